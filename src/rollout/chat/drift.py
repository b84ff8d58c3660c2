"""How a transcript's text differs from its conversation rendered again.

Each turn of the model is rendered as a word of ours, and what the template makes of that word is
replaced by the text that the model sampled. So a difference tells where the template treats the
history in another way, and its handling of a turn's inside (spaces trimmed, calls written again)
does not count.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from rollout.chat.continuation import USER_MARKER, common_prefix, list_answered_calls
from rollout.chat.reasoning import CLOSED, END_THINK, THINK, lacks_reasoning, opens_reasoning
from rollout.chat.tokenizer_backend import match_any
from rollout.chat.transcript import common_length
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from rollout.chat.continuation import ContinuationRenderer
    from rollout.chat.messages import TemplateMessage
    from rollout.chat.rendering import Tools

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
        specials: Spellings of special tokens, which both texts may hold.
        is_reasoning_stripped: Whether `rendering` lacks reasoning of earlier turns.
    """
    if transcript == rendering:
        return Drift(kind="identical")
    spelling = match_any(specials)
    texts = (transcript, rendering)
    at = common_length(transcript, rendering)
    for text in texts:  # a special token is shown in full
        tokens = spelling.finditer(text, max(0, at - WINDOW), at + WINDOW)
        at = next((token.start() for token in tokens if token.start() < at < token.end()), at)
    pieces = re.compile(rf"(?:{spelling.pattern})|\w+|\s+|.")
    left, right = (pieces.findall(text[at : at + WINDOW]) for text in texts)
    steps = difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    _, _, left_stop, _, right_stop = next(step for step in steps if step[0] != "equal")
    return Drift(
        kind=_find_kind(texts, spelling, is_reasoning_stripped),
        at=at,
        transcript=_show(transcript, at, at + len("".join(left[:left_stop]))),
        rendering=_show(rendering, at, at + len("".join(right[:right_stop]))),
    )


def _find_kind(
    texts: tuple[str, str], spelling: re.Pattern[str], is_reasoning_stripped: bool
) -> DriftKind:
    def agree(change: Callable[[str], str]) -> bool:
        left, right = ("".join(change(text).split()) for text in texts)
        return left == right

    if agree(str):
        return "whitespace"
    if agree(lambda text: spelling.sub("", text)):
        return "special_tokens"
    if is_reasoning_stripped and agree(lambda text: spelling.sub("", CLOSED.sub("", text))):
        return "reasoning_stripped"
    return "content"


def _show(text: str, start: int, stop: int) -> str:
    shown = text[start:stop]
    if len(shown) > SHOWN:
        shown = f"{shown[: SHOWN // 2]} … {shown[-SHOWN // 2 :]}"
    before, after = text[max(0, start - CONTEXT) : start], text[stop : stop + CONTEXT]
    return f"{before}[{shown}]{after}"


_QUESTION: TemplateMessage = {"role": "user", "content": USER_MARKER}


class FullRenderer:
    """Renders conversations with sampled turns in them, by the template of `continuations`."""

    def __init__(self, continuations: ContinuationRenderer) -> None:
        self._render, self._encoder = continuations.render_whole, continuations.encoder
        self._ends = continuations.turn_ends
        self._stops = [self._encoder.decode([token]) for token in continuations.stop_ids()]
        self._opening = self._render_after([_QUESTION], True)
        answer = {"role": "assistant", "content": _word("Turn", 0)}
        answered = self._render_after([_QUESTION, answer], False)
        self._drops_opening = lacks_reasoning(answered, self._opening)

    def _render_after(self, messages: list[TemplateMessage], is_open: bool) -> str:
        """What the template writes after the content of the first message, the question."""
        return self._render(messages, is_open).partition(USER_MARKER)[2]

    def render(
        self,
        messages: Sequence[TemplateMessage],
        turns: Mapping[int, str],
        tools: Tools,
        *,
        with_calls: bool,
    ) -> tuple[str, bool]:
        """Render the conversation, with the sampled texts in it, up to where its transcript ends.

        Args:
            messages: All of them, those of the model included.
            turns: What the model sampled, by position in `messages`.
            tools: As the prompt was rendered with.
            with_calls: Whether turns that tools answered call them: some templates ask for that.

        Returns:
            The text, and whether the template leaves out reasoning that was sampled, or that the
            prompt had opened.
        """
        is_open = len(messages) - 1 not in turns
        marked = list(messages)
        for at in turns:
            calls = list_answered_calls(messages[at + 1 :]) if with_calls else []
            marked[at] = {"role": "assistant", "content": _word("Turn", at)}
            if calls:  # beside calls, some leave out the content
                calls[0]["function"]["arguments"] = {"turn": _word("Turn", at)}
                marked[at] |= {"content": "", "tool_calls": calls}
        text = self._render(marked, is_open, tools)
        dropped = self._find_dropped(marked, turns, is_open, tools)
        for at, sampled in turns.items():
            body = self._find_body(marked[at], at)
            found = body if text.count(body) == 1 else _word("Turn", at)
            before, mark, after = text.partition(found)
            if not mark:
                raise TemplateError("the chat template leaves out an answer of the assistant")
            if at in dropped:
                turn = sampled.rpartition(END_THINK)[2]
            else:
                turn = self._add_opening(sampled, before)
            if at < len(messages) - 1:  # the template writes too what ended the turn
                stop = next((stop for stop in self._stops if turn.endswith(stop)), "")
                turn = turn.removesuffix(stop) + after
            text = before + turn
        return text, bool(dropped) or self._drops_opening

    def _add_opening(self, sampled: str, before: str) -> str:
        """`sampled`, after the tag that the prompt had opened and the history writes again."""
        is_closing = END_THINK in sampled and THINK not in sampled.partition(END_THINK)[0]
        if not is_closing or opens_reasoning(before) or not opens_reasoning(self._opening):
            return sampled
        return self._opening[self._opening.rfind(THINK) :] + sampled

    def _find_body(self, turn: TemplateMessage, at: int) -> str:
        """What the template writes of a turn, from where the model takes over to its end."""
        alone = self._render_after([_QUESTION, turn], False)
        body = alone.removesuffix(self._ends.calls if "tool_calls" in turn else self._ends.text)
        body = body[len(common_prefix(self._opening, body, self._encoder)) :]
        return body if _word("Turn", at) in body else _word("Turn", at)

    def _find_dropped(
        self,
        marked: Sequence[TemplateMessage],
        turns: Mapping[int, str],
        is_open: bool,
        tools: Tools,
    ) -> set[int]:
        """The turns whose reasoning the template leaves out."""
        reasoned = [at for at, sampled in turns.items() if END_THINK in sampled]
        probed = list(marked)
        for at in reasoned:
            thought = f"{THINK}\n{_word('Reason', at)}\n{END_THINK}\n\n{_word('Kept', at)}"
            probed[at] = {**marked[at], "content": f"{thought}{marked[at]['content']}"}
        try:
            text = self._render(probed, is_open, tools) if reasoned else ""
        except TemplateError:
            return set()
        return {
            at for at in reasoned if _word("Kept", at) in text and _word("Reason", at) not in text
        }


def _word(kind: str, at: int) -> str:
    return f"rollout{kind}{at}x"
