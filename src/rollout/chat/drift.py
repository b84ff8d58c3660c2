"""How a transcript's text differs from another rendering of the same conversation."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from rollout.chat.reasoning import CLOSED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

#: From no difference to the worst. "whitespace": only in white space; "special_tokens": in special
#: tokens too; "reasoning_stripped": the rendering leaves out reasoning of earlier turns;
#: "content": in anything else.
DriftKind = Literal["identical", "whitespace", "special_tokens", "reasoning_stripped", "content"]
DRIFT_KINDS: tuple[DriftKind, ...] = get_args(DriftKind)

#: Characters shown on each side of a difference, most of the difference itself, and how far its end
#: is searched for.
CONTEXT, SHOWN, WINDOW = 40, 80, 400


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """What a transcript and a rendering have in common.

    Attributes:
        kind: The least that explains every difference.
        at: Character of the first difference; -1 where there is none.
        transcript, rendering: What differs there first, in brackets, and the text around it.
    """

    kind: DriftKind
    at: int = -1
    transcript: str = ""
    rendering: str = ""

    def __str__(self) -> str:
        if self.kind == "identical":
            return "the transcript and its full rendering are identical"
        return (
            f"the transcript differs from its full rendering ({self.kind}) at character "
            f"{self.at}: {self.transcript!r} in the transcript, {self.rendering!r} in the rendering"
        )


def worst(drifts: Iterable[Drift]) -> Drift | None:
    """The first of those of the worst kind; None of none."""
    return max(drifts, key=lambda drift: DRIFT_KINDS.index(drift.kind), default=None)


def compare(
    transcript: str,
    rendering: str,
    specials: Collection[str],
    *,
    is_reasoning_stripped: bool = False,
) -> Drift:
    """The first difference, and the kind of all of them together.

    Args:
        transcript: Decoded, special tokens included.
        rendering: Of the same conversation.
        specials: Spellings of special tokens.
        is_reasoning_stripped: Whether `rendering` lacks reasoning of earlier turns.
    """
    if transcript == rendering:
        return Drift(kind="identical")
    spelling = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "$^")
    at = _first_difference(transcript, rendering)
    at = min(_start_of_special(text, at, spelling) for text in (transcript, rendering))
    left, right = (_pieces(text[at : at + WINDOW], spelling) for text in (transcript, rendering))
    steps = difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    _, _, left_stop, _, right_stop = next(step for step in steps if step[0] != "equal")
    return Drift(
        kind=_kind(transcript, rendering, spelling, is_reasoning_stripped),
        at=at,
        transcript=_excerpt(transcript, at, at + len("".join(left[:left_stop]))),
        rendering=_excerpt(rendering, at, at + len("".join(right[:right_stop]))),
    )


def _start_of_special(text: str, at: int, spelling: re.Pattern[str]) -> int:
    """The start of the special token that `at` stands in, or else `at`."""
    start = max(0, at - WINDOW)
    around = spelling.finditer(text, start, at + WINDOW)
    return next((match.start() for match in around if match.start() < at < match.end()), at)


def _pieces(text: str, spelling: re.Pattern[str]) -> list[str]:
    """`text` in special tokens, words, runs of white space and other letters."""
    return re.findall(rf"(?:{spelling.pattern})|\w+|\s+|.", text)


def _kind(
    transcript: str, rendering: str, spelling: re.Pattern[str], is_reasoning_stripped: bool
) -> DriftKind:
    if _squashed(transcript) == _squashed(rendering):
        return "whitespace"
    if _squashed(spelling.sub("", transcript)) == _squashed(spelling.sub("", rendering)):
        return "special_tokens"
    if is_reasoning_stripped:
        kept = [CLOSED.sub("", text) for text in (transcript, rendering)]
        left, right = (_squashed(spelling.sub("", text)) for text in kept)
        if left == right:
            return "reasoning_stripped"
    return "content"


def _squashed(text: str) -> str:
    return "".join(text.split())


def _first_difference(left: str, right: str) -> int:
    """Where the texts begin to differ; in steps of halves, since they may be long."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _excerpt(text: str, start: int, stop: int) -> str:
    shown = text[start:stop]
    if len(shown) > SHOWN:
        shown = f"{shown[: SHOWN // 2]} … {shown[-SHOWN // 2 :]}"
    before, after = text[max(0, start - CONTEXT) : start], text[stop : stop + CONTEXT]
    return f"{before}[{shown}]{after}"
