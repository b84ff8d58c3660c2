"""Cutting long texts to a length."""

from __future__ import annotations

from typing import Any, Literal

TruncateSide = Literal["left", "right", "middle"]

#: What stands in place of the removed text, by the side that lost it; as in verl.
MARKERS = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}
#: Our names of sides by verl's, which are those of the side kept.
SIDES_BY_VERL: dict[str, TruncateSide] = {"left": "right", "right": "left", "middle": "middle"}


def truncate_text(
    text: str,
    limit: int,
    side: TruncateSide,
    *,
    unit: Literal["characters", "tokens"] = "characters",
    tokenizer: Any = None,
    convention: Literal["rollout", "seed"] = "rollout",
) -> str:
    """`text` itself where it fits, else `limit` of its units and a marker.

    Args:
        limit: Largest number of units kept, at least 0; the marker comes on top.
        side: Where text is removed. "left" keeps the tail, "right" the head, "middle" both ends,
            with the odd unit at the head.
        unit: "characters" are Unicode code points; "tokens" are those of `tokenizer`, which has
            the methods ``encode(text, add_special_tokens=...)`` and ``decode(ids)``.
        convention: "seed" swaps "left" and "right", as verl names them: after the side kept.

    Raises:
        ValueError: An argument is none of the above.
    """
    for name, value, choices in (
        ("side", side, ("left", "right", "middle")),
        ("unit", unit, ("characters", "tokens")),
        ("convention", convention, ("rollout", "seed")),
    ):
        if value not in choices:
            *others, last = map(repr, choices)
            raise ValueError(f"{name} = {value!r}: expected {', '.join(others)} or {last}")
    if limit < 0:
        raise ValueError(f"limit = {limit}: expected 0 or more")
    if unit == "tokens" and tokenizer is None:
        raise ValueError("unit = 'tokens' needs a tokenizer")
    side = SIDES_BY_VERL[side] if convention == "seed" else side
    units: Any = text if unit == "characters" else tokenizer.encode(text, add_special_tokens=False)
    if len(units) <= limit:
        return text
    tail = {"left": limit, "right": 0, "middle": limit // 2}[side]
    ends = [units[: limit - tail], units[len(units) - tail :]]
    if unit == "tokens":  # what is left of a character that was cut is none
        ends = [str(tokenizer.decode(ids)).strip("\ufffd") if ids else "" for ids in ends]
    return MARKERS[side].join(ends)
