"""What a chat template puts after an assistant's turn.

An append-only transcript never renders its history again. What new messages add to it is found by
rendering them after a placeholder conversation, ``[user, assistant(marker), *new]``, and keeping
what follows the marker: the end of the assistant's turn, the messages, the generation prompt.

Whether a template can be used so is found out once for each pattern of messages (their roles and
keys), on contents of our own. The messages themselves are rendered each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rollout.chat.encoding import WrittenText
from rollout.chat.placeholder_exchange import (
    ASSISTANT_MARKER,
    USER_MARKER,
    Answer,
    after_answer,
    conversation,
    unusable,
    with_contents,
)
from rollout.chat.reasoning import opens_reasoning
from rollout.chat.special_token_escaping import TAG, render_escaped
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.chat.encoding import TextEncoder
    from rollout.chat.messages import TemplateMessage
    from rollout.chat.rendering import Render

#: Placeholder calls whose text is remembered, by the names and ids of what they call.
_MAX_CALLS = 256


class TurnEnds(msgspec.Struct, frozen=True, kw_only=True):
    """What a template puts after an assistant's content where nothing follows.

    Attributes:
        said: After a text, e.g. ``<|im_end|>\\n``; empty where only the next turn ends one.
        called: After tool calls, e.g. ``<|call|>``.
    """

    said: str
    called: str


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """How messages of these roles and keys follow an assistant's turn.

    Attributes:
        answer: What the placeholder assistant says before the messages.
        turn_end: What the text of them starts with.
        opening: What follows the last content: the opening of the next turn.
        opens_reasoning: Whether that ends inside reasoning.
    """

    answer: Answer
    turn_end: str
    opening: str
    opens_reasoning: bool


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """What new messages add after an assistant's turn.

    Attributes:
        written: The text after the assistant's content.
        turn_end: What ends the assistant's turn, with which the text starts, e.g.
            ``<|im_end|>\\n``; may be empty.
        opens_reasoning: Whether the next turn begins inside reasoning.
    """

    written: WrittenText
    turn_end: str
    opens_reasoning: bool


class ContinuationRenderer:
    """Renders new messages as they follow a generated turn. Safe to use from several threads.

    Args:
        render: What the template makes of messages.
        encoder: Knows the special tokens.
    """

    def __init__(self, render: Render, encoder: TextEncoder) -> None:
        self._render = render
        self._encoder = encoder
        self._patterns: dict[tuple[object, ...], Pattern] = {}
        self._calls: dict[object, str] = {}
        self._ends: TurnEnds | None = None

    def render(
        self, messages: Sequence[TemplateMessage], max_tokens: int | None = None
    ) -> Continuation:
        """What the messages add.

        Args:
            messages: As they follow a turn.
            max_tokens: Tokens that there is room for after the turn end; None for any number.

        Raises:
            TemplateError: The template refuses such messages or cannot be used append-only.
            TooManyTokens: They certainly have more than `max_tokens`.
        """
        pattern = self._find_pattern(messages)
        turn_end = pattern.turn_end
        if max_tokens is not None:  # it may have been sampled: then it needs no room
            max_tokens += len(turn_end.encode())

        def render(given: Sequence[TemplateMessage], _: object) -> str:
            nonlocal turn_end
            text, turn_end = self._render_after(pattern.answer, given)
            return text

        written = render_escaped(render, self._encoder, messages, None, max_tokens)
        is_usual = written.text.endswith(pattern.opening)
        opens = pattern.opens_reasoning if is_usual else opens_reasoning(written.text)
        return Continuation(written=written, turn_end=turn_end, opens_reasoning=opens)

    def turn_ends(self) -> TurnEnds:
        """What the template puts after an assistant's turn where nothing follows.

        Raises:
            TemplateError: It refuses such a conversation.
        """
        if self._ends is None:
            said = after_answer(self._render(conversation(), False))
            self._ends = TurnEnds(said=said, called=self._call_end(said))
        return self._ends

    def _call_end(self, said: str) -> str:
        """What ends a turn that calls a tool: as a text ends, or else its last special token."""
        result = {"role": "tool", "content": ""}
        try:
            calling = self._render(conversation([result], "words and calls")[:2], False)
        except TemplateError:
            return said
        if calling.endswith(said):
            return said
        places = self._encoder.special_token_spellings(calling)
        return calling[places[-1][0] :] if places else said

    def _render_after(self, answer: Answer, messages: Sequence[TemplateMessage]) -> tuple[str, str]:
        """The text after the assistant's content, and the turn end that it starts with."""
        ends = self.turn_ends()
        exchange = conversation(messages, answer)
        whole = self._render(exchange, True)
        if answer == "words":
            after = after_answer(whole)
            return after, self._find_end(after, ends.said)
        if ASSISTANT_MARKER in whole:  # what stands before it may change, see `_refuse_rewriting`
            calling, whole = self._render_calls(exchange[1]), after_answer(whole)
        else:
            calling = self._render(exchange[:2], False)
        if not (calling.endswith(ends.called) and whole.startswith(calling)):
            raise unusable("it writes a call in another way once it is answered")
        return ends.called + whole[len(calling) :], ends.called

    def _render_calls(self, turn: TemplateMessage) -> str:
        """What a placeholder turn has after its content, where nothing follows."""
        key = tuple((call["id"], call["function"]["name"]) for call in turn["tool_calls"])
        known = self._calls.get(key)
        if known is None:
            known = after_answer(self._render([*conversation()[:1], turn], False))
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            self._calls[key] = known
        return known

    def _find_end(self, after: str, said: str) -> str:
        """What of `after` ends the turn: some templates end it otherwise once something follows."""
        if not said or after.startswith(said):
            return said
        places = self._encoder.special_token_spellings(after)
        if not places or self._encoder.is_plain(said):
            return common_prefix(said, after, self._encoder)
        end = after[: places[0][1]]
        return common_prefix(said, after, self._encoder) if said.startswith(end) else end

    def _find_pattern(self, messages: Sequence[TemplateMessage]) -> Pattern:
        """How messages of these roles and keys follow a turn.

        Raises:
            TemplateError: The template refuses them or cannot be used append-only.
        """
        key = tuple([(message["role"], *sorted(message)) for message in messages])
        pattern = self._patterns.get(key)
        if pattern is None:
            pattern = self._patterns[key] = self._try_answers(messages)
        return pattern

    def _try_answers(self, messages: Sequence[TemplateMessage]) -> Pattern:
        if messages[0]["role"] != "tool":
            return self._examine(messages, "words")
        answers: tuple[Answer, ...] = ("words and calls", "calls", "words")
        refusals = []
        for answer in answers:
            try:
                return self._examine(messages, answer)
            except TemplateError as error:
                refusals.append(error)
        called, _, said = refusals
        if str(called) == str(said):
            raise said
        raise TemplateError(f"{said}; after a tool call: {called}") from called

    def _examine(self, messages: Sequence[TemplateMessage], answer: Answer) -> Pattern:
        """How messages like these are written, after a look at what the template does with them."""
        markers = [f"rolloutContentMarker{at}x" for at in range(len(messages))]
        marked = with_contents(messages, markers)
        self._refuse_rewriting(conversation(marked, answer))
        text, turn_end = self._render_after(answer, marked)
        opening = _find_opening(text, markers, messages)
        return Pattern(
            answer=answer,
            turn_end=turn_end,
            opening=opening,
            opens_reasoning=opens_reasoning(opening),
        )

    def _refuse_rewriting(self, exchange: Sequence[TemplateMessage]) -> None:
        """Refuse a template under which new messages change what stands before them.

        The opening of the assistant's turn may change: templates of reasoning models leave out the
        reasoning of earlier turns, and an append-only transcript keeps what was sampled. Contents
        beside a call are left out by some, and nothing of ours follows them.
        """
        text = self._render(exchange, True)
        is_calling = "tool_calls" in exchange[1]
        if not is_calling:
            after_answer(text)
        for marker, what in ((USER_MARKER, "user"), (ASSISTANT_MARKER, "assistant")):
            times = text.count(marker)
            if times != 1 and not (marker == ASSISTANT_MARKER and is_calling and times == 0):
                raise unusable(f"it writes an earlier {what} message {times} times")
        head = text.partition(USER_MARKER)[0]
        if ASSISTANT_MARKER in head:
            raise unusable("it changes the order of messages")
        if head != self._render(conversation(), False).partition(USER_MARKER)[0]:
            raise unusable("new messages change the text before the first message")


def _find_opening(text: str, markers: Sequence[str], messages: Sequence[TemplateMessage]) -> str:
    """What follows the last content; contents stand in order, each once, or it raises."""
    for marker, message in zip(markers, messages, strict=True):
        _, found, text = text.partition(marker)
        if not found or marker in text:
            times = "in another place or not at all" if not found else "more than once"
            raise unusable(f"it writes the content of {message['role']!r} messages {times}")
    return text


def common_prefix(left: str, right: str, encoder: TextEncoder) -> str:
    """What both texts begin with, in whole special tokens and whole tags."""
    pairs = zip(left, right, strict=False)
    length = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
    for text in (left, right):
        places = [
            *encoder.special_token_spellings(text),
            *(tag.span() for tag in TAG.finditer(text)),
        ]
        length = min([length, *(start for start, stop in places if start < length < stop)])
    return left[:length]
