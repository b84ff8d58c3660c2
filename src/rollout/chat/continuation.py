"""What a chat template puts after an assistant's turn.

An append-only transcript never renders its history again. What new messages add to it is found by
rendering them after a placeholder conversation, ``[user, assistant(marker), *new]``, and keeping
what follows the marker: the end of the assistant's turn, the messages, the generation prompt.

Where a template writes contents in a known way, the text around them is the same every time: it is
found once for each pattern of messages, and from then on a turn costs a string join.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from rollout.chat.content_tests import content_tests
from rollout.chat.messages import has_media
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
from rollout.chat.slotted_text import SlottedText, find_slots, pattern_of
from rollout.chat.special_token_escaping import render_escaped
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.chat.encoding import TextEncoder, WrittenText
    from rollout.chat.messages import TemplateMessage
    from rollout.chat.rendering import Renderer

_TAG = re.compile(r"</?\w+>")


class TurnEnds(msgspec.Struct, frozen=True, kw_only=True):
    """What a template puts after an assistant's content where nothing follows.

    Attributes:
        said: After a text, e.g. ``<|im_end|>\\n``; empty where only the next turn ends one.
        called: After tool calls, e.g. ``<|call|>``.
    """

    said: str
    called: str


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """How new messages of one pattern follow an assistant's turn.

    Attributes:
        turn_end: What ends the assistant's turn, e.g. ``<|im_end|>\\n``; may be empty.
        opens_reasoning: Whether the next turn's opening ends inside reasoning.
        answer: What the placeholder assistant says before the messages.
        slotted: The text; None where the template does more with contents than it knows.
    """

    turn_end: str
    opens_reasoning: bool
    answer: Answer
    slotted: SlottedText | None = None


class ContinuationRenderer:
    """Renders new messages as they follow a generated turn; remembers one form per pattern.

    Args:
        renderer: Runs the template.
        encoder: Knows the special tokens.
    """

    def __init__(self, renderer: Renderer, encoder: TextEncoder) -> None:
        self._renderer, self._render = renderer, renderer.render
        self._encoder = encoder
        self._forms: dict[tuple[object, ...], Continuation] = {}
        self._ends: TurnEnds | None = None
        self._tests = content_tests(renderer.source)

    def render(
        self, messages: Sequence[TemplateMessage], most: int | None = None
    ) -> tuple[WrittenText, Continuation]:
        """The text after the assistant's content, and its form.

        Args:
            messages: As they follow a turn.
            most: Tokens that there is room for after the turn end; None for any number.

        Raises:
            TemplateError: The template refuses such messages or cannot be used append-only.
            TooManyTokens: They certainly have more than `most`.
        """
        form = self.form(messages)
        if most is not None:
            most += len(form.turn_end.encode())  # it may have been sampled: then it needs no room
        joined = self._joined(form, messages, most)
        if joined is None:
            joined = render_escaped(
                lambda given, _: self._rendered(form.answer, given)[0],
                self._encoder,
                messages,
                None,
                most,
            )
        return joined, form

    def refuse_beyond(self, most: int, messages: Sequence[TemplateMessage]) -> None:
        """Raise where the lengths of contents, which are not rendered, say that there is no room.

        Raises:
            TemplateError: The template refuses such messages or cannot be used append-only.
            TooManyTokens: They certainly have more than `most`.
        """
        form = self.form(messages)
        if form.slotted is None or self._tests is None or has_media(messages):
            return
        way = "verbatim" if form.slotted.way == "json" else ""  # which only makes them longer
        contents = form.slotted.contents(messages, self._tests, way)
        if contents is not None:
            self._encoder.refuse_beyond(most + len(form.turn_end.encode()), "".join(contents))

    def form(self, messages: Sequence[TemplateMessage]) -> Continuation:
        """How messages like these follow a turn.

        Raises:
            TemplateError: The template refuses such messages or cannot be used append-only.
        """
        pattern = pattern_of(messages)
        form = self._forms.get(pattern)
        if form is None:
            form = self._forms[pattern] = self._find(messages)
        return form

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

    def _joined(
        self, form: Continuation, messages: Sequence[TemplateMessage], most: int | None
    ) -> WrittenText | None:
        """The text without rendering; None where a content might be treated specially."""
        if form.slotted is None or self._tests is None or has_media(messages):
            return None
        contents = form.slotted.contents(messages, self._tests)
        return None if contents is None else form.slotted.written(contents, self._encoder, most)

    def _rendered(self, answer: Answer, messages: Sequence[TemplateMessage]) -> tuple[str, str]:
        """The text after the assistant's content, and the turn end that it starts with."""
        ends = self.turn_ends()
        whole = self._render(conversation(messages, answer), True)
        if answer == "words":
            after = after_answer(whole)
            return after, self._end_of(after, ends.said)
        calling = self._render(conversation(messages, answer)[:2], False)
        if ASSISTANT_MARKER in calling:  # what stands before it may change, see `_refuse_rewriting`
            calling, whole = after_answer(calling), after_answer(whole)
        if not (calling.endswith(ends.called) and whole.startswith(calling)):
            raise unusable("it writes a call in another way once it is answered")
        return ends.called + whole[len(calling) :], ends.called

    def _end_of(self, after: str, said: str) -> str:
        """What of `after` ends the turn: some templates end it otherwise once something follows."""
        if not said or after.startswith(said):
            return said
        places = self._encoder.special_token_spellings(after)
        if not places or self._encoder.is_plain(said):
            return common_prefix(said, after, self._encoder)
        end = after[: places[0][1]]
        return common_prefix(said, after, self._encoder) if said.startswith(end) else end

    def _find(self, messages: Sequence[TemplateMessage]) -> Continuation:
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

    def _examine(self, messages: Sequence[TemplateMessage], answer: Answer) -> Continuation:
        """The form of messages like these, after a look at what the template does with them."""
        markers = [f"rolloutContentMarker{at}x" for at in range(len(messages))]
        marked = with_contents(messages, markers)
        self._refuse_rewriting(conversation(marked, answer))
        text, turn_end = self._rendered(answer, marked)
        literals = _split(text, markers, messages)
        form = Continuation(
            turn_end=turn_end,
            opens_reasoning=opens_reasoning(literals[-1]),
            answer=answer,
        )
        if not self._renderer.is_steady:
            another = ContinuationRenderer(self._renderer.at_another_time(), self._encoder)
            if another._rendered(answer, marked)[0] != text:
                return form  # it writes the time, which is another one each time
        try:
            slotted = find_slots(partial(self._after_turn_end, form), messages)
        except TemplateError:  # it looks at names
            return form
        return msgspec.structs.replace(form, slotted=slotted)

    def _after_turn_end(
        self, form: Continuation, messages: Sequence[TemplateMessage]
    ) -> str | None:
        """What is written of the messages; None where the turn before them ends otherwise."""
        text, turn_end = self._rendered(form.answer, messages)
        return text if turn_end == form.turn_end else None

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


def _split(
    text: str, markers: Sequence[str], messages: Sequence[TemplateMessage]
) -> tuple[str, ...]:
    literals = []
    for marker, message in zip(markers, messages, strict=True):
        literal, found, text = text.partition(marker)
        if not found or marker in text:
            times = "in another place or not at all" if not found else "more than once"
            raise unusable(f"it writes the content of {message['role']!r} messages {times}")
        literals.append(literal)
    return (*literals, text)


def common_prefix(left: str, right: str, encoder: TextEncoder) -> str:
    """What both texts begin with, in whole special tokens and whole tags."""
    pairs = zip(left, right, strict=False)
    length = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
    for text in (left, right):
        places = [
            *encoder.special_token_spellings(text),
            *(tag.span() for tag in _TAG.finditer(text)),
        ]
        length = min([length, *(start for start, stop in places if start < length < stop)])
    return left[:length]
