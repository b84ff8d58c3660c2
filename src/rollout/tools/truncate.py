"""Cutting long texts to a length."""

from __future__ import annotations

from typing import Any, Literal

TruncateSide = Literal["left", "right", "middle"]

#: What stands in place of the removed text, by the side that lost it; as in verl.
MARKERS = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}
#: Our names of sides by verl's, which are those of the side kept.
_SEED_SIDES: dict[str, TruncateSide] = {"left": "right", "right": "left", "middle": "middle"}


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
    side = truncate_side(side, convention)
    if limit < 0:
        raise ValueError(f"limit = {limit}: expected 0 or more")
    if unit not in ("characters", "tokens"):
        raise ValueError(f"unit = {unit!r}: expected 'characters' or 'tokens'")
    if unit == "tokens" and tokenizer is None:
        raise ValueError("unit = 'tokens' needs a tokenizer")
    units: Any = text if unit == "characters" else tokenizer.encode(text, add_special_tokens=False)
    if len(units) <= limit:
        return text
    tail = {"left": limit, "right": 0, "middle": limit // 2}[side]
    ends = [units[: limit - tail], units[len(units) - tail :]]
    if unit == "tokens":  # what is left of a character that was cut is none
        ends = [str(tokenizer.decode(ids)).strip("\ufffd") if ids else "" for ids in ends]
    return MARKERS[side].join(ends)


def truncate_side(side: str, convention: str) -> TruncateSide:
    """Our name of a side; "seed" is verl's convention, which names them after the side kept.

    Raises:
        ValueError: There is no such side or convention.
    """
    if side not in _SEED_SIDES:
        raise ValueError(f"side = {side!r}: expected 'left', 'right' or 'middle'")
    if convention not in ("rollout", "seed"):
        raise ValueError(f"convention = {convention!r}: expected 'rollout' or 'seed'")
    return _SEED_SIDES[side] if convention == "seed" else _SEED_SIDES[_SEED_SIDES[side]]
