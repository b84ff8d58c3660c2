"""What a chat template puts after an assistant's turn.

An append-only transcript never renders its history again. What new messages add to it is found by
rendering them after a placeholder conversation, ``[user, assistant(marker), *new]``, and keeping
what follows the marker: the end of the assistant's turn, the messages, the generation prompt.

Where a template writes contents in a known way, the text around them is the same every time: it is
found once for each pattern of messages, and from then on a turn costs a string join.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from rollout.chat.content_tests import content_tests
from rollout.chat.encoding import Place, TextEncoder, WrittenText
from rollout.chat.messages import TemplateMessage
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
from rollout.chat.special_token_escaping import render_escaped
from rollout.errors import TemplateError

#: `render(messages, add_generation_prompt)`: what the template makes of a conversation.
Render = Callable[[Sequence[TemplateMessage], bool], str]

#: Put around a marker, all that templates are known to treat specially: white space in either
#: order, quotes, escapes, markup, other alphabets.
PROBES = (("\n \t", " \\n\"'{}<>&\\ é漢\n\n  x\t\n "), (" \n", "\r\n"))
#: Stand for contents, names and ids: nine letters or digits, which Mistral's templates ask of ids.
SLOT = re.compile("(zqSlot[0-9]{3})")
NAME_PROBE = "zqName{:03d}"
_TAG = re.compile(r"</?\w+>")

#: How templates write a content down.
WAYS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {
        "verbatim": lambda text: text,
        "stripped": str.strip,
        "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    }
)


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
        literals: The text around the slots, one more than there are of them; None where
            the template does more with contents than one of `WAYS`.
        slots: What stands between the literals: position and key of a message.
        way: How contents are written.
    """

    turn_end: str
    opens_reasoning: bool
    answer: Answer
    literals: tuple[str, ...] | None = None
    slots: tuple[tuple[int, str], ...] = ()
    way: str = "verbatim"


class ContinuationRenderer:
    """Renders new messages as they follow a generated turn; remembers one form per pattern.

    Args:
        render: What the template makes of a conversation; raises `TemplateError`.
        encoder: Knows the special tokens.
        source: Text of the template.
    """

    def __init__(self, render: Render, encoder: TextEncoder, source: str) -> None:
        self._render = render
        self._encoder = encoder
        self._forms: dict[tuple[object, ...], Continuation] = {}
        self._ends: TurnEnds | None = None
        self._tests = content_tests(source)

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
        if form.way == "json":  # which only makes them longer
            form = msgspec.structs.replace(form, way="verbatim")
        contents = self._contents(form, messages)
        if contents is not None:
            self._encoder.refuse_beyond(most + len(form.turn_end.encode()), "".join(contents))

    def form(self, messages: Sequence[TemplateMessage]) -> Continuation:
        """How messages like these follow a turn.

        Raises:
            TemplateError: The template refuses such messages or cannot be used append-only.
        """
        pattern = tuple((message["role"], *sorted(message)) for message in messages)
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
        contents = self._contents(form, messages)
        if contents is None or form.literals is None:
            return None
        joined = _interleave(form.literals, contents)
        self._encoder.refuse_beyond(most, joined)
        if all(map(self._encoder.is_plain, contents)):
            return WrittenText(joined)
        plain, length = list[Place](), len(form.literals[0])
        for text, literal in zip(contents, form.literals[1:], strict=True):
            plain += self._encoder.special_token_spellings(text, length)
            length += len(text) + len(literal)
        return WrittenText(joined, tuple(plain))

    def _contents(
        self, form: Continuation, messages: Sequence[TemplateMessage]
    ) -> list[str] | None:
        """What stands in the slots; None where it might be treated specially."""
        if form.literals is None or self._tests is None:
            return None
        contents, way = [], WAYS[form.way]
        for at, key in form.slots:
            text = str(messages[at][key])
            if not text or any(test in text for test in self._tests):
                return None
            contents.append(way(text) if key == "content" else text)
        return contents

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
        return self._remembered(form, messages) or form

    def _remembered(
        self, form: Continuation, messages: Sequence[TemplateMessage]
    ) -> Continuation | None:
        """The form with its literals; None where the template must be asked every time."""
        if any(not _KNOWN.issuperset(message) for message in messages):
            return None
        slots = [
            (at, key)
            for at, message in enumerate(messages)
            for key in ("content", *_NAMES)
            if key in message
        ]
        markers = {f"zqSlot{at:03d}": slot for at, slot in enumerate(slots)}
        marked = [dict(message) for message in messages]
        for marker, (at, key) in markers.items():
            marked[at][key] = marker
        try:
            text, turn_end = self._rendered(form.answer, marked)
        except TemplateError:  # it looks at names
            return None
        pieces = SLOT.split(text)
        if turn_end != form.turn_end or not set(pieces[1::2]) <= set(markers):
            return None
        form = msgspec.structs.replace(
            form,
            literals=tuple(pieces[::2]),
            slots=tuple(markers[marker] for marker in pieces[1::2]),
        )
        for way in WAYS:
            known = msgspec.structs.replace(form, way=way)
            if all(self._is_foretold(known, messages, probe) for probe in PROBES):
                return known
        return None

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

    def _is_foretold(
        self, form: Continuation, messages: Sequence[TemplateMessage], probe: tuple[str, str]
    ) -> bool:
        """Whether the literals give what the template renders for awkward contents."""
        assert form.literals is not None
        probed = [
            {
                **message,
                "content": f"{probe[0]}rolloutProbe{at}{probe[1]}",
                **{key: NAME_PROBE.format(at) for key in _NAMES if key in message},
            }
            for at, message in enumerate(messages)
        ]
        way = WAYS[form.way]
        texts = [
            way(probed[at][key]) if key == "content" else probed[at][key] for at, key in form.slots
        ]
        try:
            text, _ = self._rendered(form.answer, probed)
        except TemplateError:
            return False
        return text == _interleave(form.literals, texts)


#: What of a message other than its content may be written down, and all that may be known of one.
_NAMES = ("name", "tool_call_id")
_KNOWN = frozenset(("role", "content", *_NAMES))


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


def _interleave(literals: Sequence[str], contents: Sequence[str]) -> str:
    pieces = itertools.chain.from_iterable(zip(literals, contents, strict=False))
    return "".join(pieces) + literals[-1]


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
