"""A finished conversation as its template would render it, in the model's own words.

Each turn of the model is rendered as a word of ours, and what the template makes of that word is
replaced by the text that the model sampled. So the rendering tells where a template treats the
history in another way, and its handling of a turn's inside (spaces trimmed, calls written again)
does not count.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.continuation import common_prefix
from rollout.chat.messages import template_call
from rollout.chat.placeholder_exchange import USER_MARKER
from rollout.chat.reasoning import END_THINK, THINK, lacks_reasoning, opens_reasoning
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.chat.continuation import TurnEnds
    from rollout.chat.encoding import TextEncoder
    from rollout.chat.messages import TemplateMessage
    from rollout.chat.rendering import Render
    from rollout.chat.special_token_escaping import Tools


_QUESTION: TemplateMessage = {"role": "user", "content": USER_MARKER}


class FullRendering(msgspec.Struct, frozen=True):
    """A conversation rendered as a whole.

    Attributes:
        text: With the sampled texts in it.
        is_reasoning_stripped: Whether the template leaves out reasoning that was sampled, or that
            the prompt had opened.
    """

    text: str
    is_reasoning_stripped: bool


class FullRenderer:
    """Renders conversations with sampled turns in them.

    Args:
        render: What the template makes of a conversation; raises `TemplateError`.
        encoder: Knows the special tokens.
        ends: What it puts after a turn.
        stops: Spellings of tokens that end a turn.
    """

    def __init__(
        self, render: Render, encoder: TextEncoder, ends: TurnEnds, stops: Sequence[str]
    ) -> None:
        self._render = render
        self._encoder = encoder
        self._ends = ends
        self._stops = stops
        self._opening = render([_QUESTION], True, None).partition(USER_MARKER)[2]
        answer = {"role": "assistant", "content": _mark(0)}
        answered = render([_QUESTION, answer], False, None).partition(USER_MARKER)[2]
        self._drops_opening = lacks_reasoning(answered, self._opening)

    def render(
        self,
        messages: Sequence[TemplateMessage],
        said: Mapping[int, str],
        tools: Tools,
        *,
        with_calls: bool,
    ) -> FullRendering:
        """The conversation, up to where a transcript of it ends.

        Args:
            messages: All of them, those that the model said included.
            said: What the model sampled, by position in `messages`.
            tools: As the prompt was rendered with.
            with_calls: Whether turns that tools answered call them: some templates ask for that.

        Raises:
            TemplateError: The template refuses the conversation.
        """
        is_open = len(messages) - 1 not in said
        marked = _marked(messages, said, with_calls=with_calls)
        text = self._render(marked, is_open, tools)
        dropped = self._without_reasoning(marked, said, is_open, tools)
        for at, sampled in said.items():
            body = self._body(marked[at], at)
            found = body if text.count(body) == 1 else _mark(at)
            before, mark, after = text.partition(found)
            if not mark:
                raise TemplateError("the chat template leaves out an answer of the assistant")
            if at in dropped:
                kept = sampled.rpartition(END_THINK)[2]
            else:
                kept = self._opened(sampled, before)
            is_last = at == len(messages) - 1
            text = before + kept if is_last else before + self._ended(kept) + after
        return FullRendering(text, bool(dropped) or self._drops_opening)

    def _opened(self, sampled: str, before: str) -> str:
        """`sampled`, after the tag that the prompt had opened and the history writes again."""
        is_closing = END_THINK in sampled and THINK not in sampled.partition(END_THINK)[0]
        if not is_closing or opens_reasoning(before) or not opens_reasoning(self._opening):
            return sampled
        return self._opening[self._opening.rfind(THINK) :] + sampled

    def _ended(self, sampled: str) -> str:
        """`sampled` without the token that ended it: the template writes it too."""
        stop = next((stop for stop in self._stops if sampled.endswith(stop)), "")
        return sampled.removesuffix(stop)

    def _body(self, turn: TemplateMessage, at: int) -> str:
        """What the template writes of a turn, from where the model takes over to its end."""
        alone = self._render([_QUESTION, turn], False, None).partition(USER_MARKER)[2]
        body = alone.removesuffix(self._ends.called if "tool_calls" in turn else self._ends.said)
        common = len(common_prefix(self._opening, body, self._encoder))
        return body[common:] if _mark(at) in body[common:] else _mark(at)

    def _without_reasoning(
        self,
        marked: Sequence[TemplateMessage],
        said: Mapping[int, str],
        is_open: bool,
        tools: Tools,
    ) -> frozenset[int]:
        """The turns whose reasoning the template leaves out."""
        reasoned = [at for at, sampled in said.items() if END_THINK in sampled]
        if not reasoned:
            return frozenset()
        probed = list(marked)
        for at in reasoned:
            content = f"{THINK}\n{_reason(at)}\n{END_THINK}\n\n{_kept(at)}{marked[at]['content']}"
            probed[at] = {**marked[at], "content": content}
        try:
            text = self._render(probed, is_open, tools)
        except TemplateError:
            return frozenset()
        return frozenset(at for at in reasoned if _kept(at) in text and _reason(at) not in text)


def _marked(
    messages: Sequence[TemplateMessage], said: Mapping[int, str], *, with_calls: bool
) -> list[TemplateMessage]:
    """The messages with a word in the place of each sampled turn.

    Args:
        messages: All of them.
        said: Which of them were sampled.
        with_calls: Whether a turn that tools answered calls them: some templates ask for that.
    """
    marked = list(messages)
    for at in said:
        turn: dict[str, Any] = {"role": "assistant", "content": _mark(at)}
        results = itertools.takewhile(lambda message: message["role"] == "tool", messages[at + 1 :])
        calls = [
            template_call(result.get("tool_call_id", f"call_{n}"), result.get("name", "tool"), {})
            for n, result in enumerate(results)
        ]
        if calls and with_calls:  # beside calls, some leave out the content
            calls[0]["function"]["arguments"] = {"turn": turn["content"]}
            turn.update(content="", tool_calls=calls)
        marked[at] = turn
    return marked


def _mark(at: int) -> str:
    return f"rolloutTurn{at}x"


def _kept(at: int) -> str:
    return f"rolloutKept{at}x"


def _reason(at: int) -> str:
    return f"rolloutReason{at}x"
