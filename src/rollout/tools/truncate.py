"""Cutting long texts to a length, between characters as a reader sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import regex  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Sequence

TruncateSide = Literal["left", "right", "middle"]

#: What stands in place of the removed text: at the start, at the end, in between; as in verl.
MARKER_LEFT = "(truncated)..."
MARKER_RIGHT = "...(truncated)"
MARKER_MIDDLE = "...(truncated)..."

#: Code points looked at on either side of a cut, so that the cost does not grow with the text. A
#: user-perceived character (or a row of flags) longer than this is cut all the same: it is no text.
MAX_CLUSTER = 256

#: Characters first read for each token that is wanted; more where they turn out to be fewer.
CHARACTERS_PER_TOKEN = 8

_CLUSTER = regex.compile(r"\X")
_SEED_SIDES: dict[str, TruncateSide] = {"left": "right", "right": "left", "middle": "middle"}


class Tokenizer(Protocol):
    """What truncation by tokens needs of a tokenizer; those of transformers have it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Ids of `text`."""

    def decode(self, ids: Sequence[int]) -> Any:
        """Text of `ids`."""


def truncate_text(
    text: str,
    limit: int,
    side: TruncateSide,
    *,
    unit: Literal["characters", "tokens"] = "characters",
    tokenizer: Tokenizer | None = None,
    convention: Literal["rollout", "seed"] = "rollout",
) -> str:
    """`text` itself where it fits, else at most `limit` of its units and a marker.

    Grapheme clusters (an emoji with its modifiers, a letter with its accents) stay whole, so that
    fewer than `limit` units may be left. A text of 10 MB costs no more than a short one.

    Args:
        limit: Largest number of units kept, at least 0; the marker comes on top.
        side: Where text is removed. "left" keeps the tail, "right" the head, "middle" both ends,
            with the odd unit at the head.
        unit: "characters" are Unicode code points; "tokens" are those of `tokenizer`.
        convention: "seed" swaps "left" and "right", as verl names them: after the side kept.

    Raises:
        ValueError: An argument is none of the above.
    """
    side = truncate_side(side, convention)
    if limit < 0:
        raise ValueError(f"limit = {limit}: expected 0 or more")
    if unit == "characters":
        if len(text) <= limit:
            return text
        return _joined(*_cut(text, limit, side), side)
    if unit != "tokens":
        raise ValueError(f"unit = {unit!r}: expected 'characters' or 'tokens'")
    if tokenizer is None:
        raise ValueError("unit = 'tokens' needs a tokenizer")
    return _truncate_tokens(text, limit, side, tokenizer)


def truncate_side(side: str, convention: str) -> TruncateSide:
    """Our name of a side; "seed" is verl's convention, which names them after the side kept.

    Raises:
        ValueError: There is no such side or convention.
    """
    if side not in _SEED_SIDES:
        raise ValueError(f"side = {side!r}: expected 'left', 'right' or 'middle'")
    if convention not in ("rollout", "seed"):
        raise ValueError(f"convention = {convention!r}: expected 'rollout' or 'seed'")
    swapped = _SEED_SIDES[side]
    return swapped if convention == "seed" else _SEED_SIDES[swapped]


def _shares(limit: int, side: TruncateSide) -> tuple[int, int]:
    """Units kept of the head and of the tail."""
    if side == "middle":
        return limit - limit // 2, limit // 2
    return (limit, 0) if side == "right" else (0, limit)


def _joined(head: str, tail: str, side: TruncateSide) -> str:
    if side == "middle":
        return f"{head}{MARKER_MIDDLE}{tail}"
    return f"{head}{MARKER_RIGHT}" if side == "right" else f"{MARKER_LEFT}{tail}"


def _cut(text: str, limit: int, side: TruncateSide) -> tuple[str, str]:
    """Head and tail of a text that is longer than `limit` characters."""
    head, tail = _shares(limit, side)
    end, _ = _boundaries(text, head)
    _, start = _boundaries(text, len(text) - tail)
    return text[:end], text[start:]


def _boundaries(text: str, at: int) -> tuple[int, int]:
    """The nearest ends of clusters at or before and at or after `at`."""
    if at in (0, len(text)):
        return at, at
    start, stop = max(0, at - MAX_CLUSTER), min(len(text), at + MAX_CLUSTER)
    for cluster in _CLUSTER.finditer(text, start, stop):
        before, after = cluster.span()
        if after < at:
            continue
        starts_inside = before > start or start == 0
        ends_inside = after < stop or stop == len(text)
        return (before, after) if after > at and starts_inside and ends_inside else (at, at)
    return at, at


def _truncate_tokens(text: str, limit: int, side: TruncateSide, tokenizer: Tokenizer) -> str:
    ids = _end_ids(text, limit, tokenizer, from_start=True)
    if len(ids) <= limit:
        return text
    head, tail = _shares(limit, side)
    kept_head = _head(text, ids[:head], tokenizer) if head else ""
    if not tail:
        return _joined(kept_head, "", side)
    ids = _end_ids(text, tail, tokenizer, from_start=False)
    return _joined(kept_head, _tail(text, ids[-tail:], tokenizer), side)


def _end_ids(text: str, count: int, tokenizer: Tokenizer, *, from_start: bool) -> Sequence[int]:
    """More than `count` ids of one end of the text, or all ids of a text that has no more.

    Tokens depend on the text around them only, so the rest of a long text stays unread; the id at
    the cut, which might depend on it, is one too many.
    """
    width = (count + 1) * CHARACTERS_PER_TOKEN
    while True:
        part = text[:width] if from_start else text[-width:]
        ids = tokenizer.encode(part, add_special_tokens=False)
        if len(ids) > count or width >= len(text):
            return ids
        width *= 4


def _head(text: str, ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """What `ids` say, as a slice of `text` wherever the tokenizer gives back what it took."""
    said = str(tokenizer.decode(ids)).rstrip("\ufffd")
    return text[: _boundaries(text, len(said))[0]] if text.startswith(said) else said


def _tail(text: str, ids: Sequence[int], tokenizer: Tokenizer) -> str:
    said = str(tokenizer.decode(ids)).lstrip("\ufffd")
    return text[_boundaries(text, len(text) - len(said))[1] :] if text.endswith(said) else said
