"""What a chat template puts after an assistant's turn.

An append-only transcript never renders its history again. What new messages add to it is found by
rendering them behind a made-up conversation, ``[user, assistant(marker), *new]``, and keeping
what follows the marker: the end of the assistant's turn, the messages, the generation prompt.

Where a template writes contents verbatim, the text around them is the same every time: it is
found once for each pattern of roles, and from then on a turn costs a string join.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from rollout.chat.content_tests import content_tests
from rollout.chat.messages import TemplateMessage, template_call
from rollout.errors import TemplateError

#: `render(messages, add_generation_prompt)`: what the template makes of a conversation.
Render = Callable[[Sequence[TemplateMessage], bool], str]

#: Letters only, so that templates which trim or JSON-encode contents leave them recognisable.
HISTORY = "rolloutHistoryMarker"
ANSWER = "rolloutAnswerMarker"

#: Put around a marker, all that templates are known to treat specially: white space in either
#: order, quotes, escapes, markup, other alphabets.
PROBES = (("\n \t", " \\n\"'{}<>&\\ é漢\n\n  x\t\n "), (" \n", "\r\n"))


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """How new messages of one pattern follow an assistant's turn.

    Attributes:
        turn_end: What ends the assistant's turn, e.g. ``<|im_end|>\\n``; may be empty.
        is_calling: Whether the made-up assistant calls tools: some templates refuse results that
            nobody asked for.
        literals: The text around the contents, one more than there are messages; None where
            the template does more with contents than writing them down.
        is_stripped: Whether the template strips white space around contents.
    """

    turn_end: str
    is_calling: bool
    literals: tuple[str, ...] | None = None
    is_stripped: bool = False


class ContinuationRenderer:
    """Renders new messages as they follow a generated turn; remembers one form per pattern.

    Args:
        render: What the template makes of a conversation; raises `TemplateError`.
        source: Text of the template.
    """

    def __init__(self, render: Render, source: str) -> None:
        self._render = render
        self._forms: dict[tuple[object, ...], Continuation] = {}
        self._tests = content_tests(source)

    def render(self, messages: Sequence[TemplateMessage]) -> tuple[str, str]:
        """The text after the assistant's content, and the turn end that it starts with.

        Raises:
            TemplateError: The template refuses such messages or cannot be used append-only.
        """
        pattern = tuple((message["role"], *sorted(message)) for message in messages)
        form = self._forms.get(pattern)
        if form is None:
            form = self._forms[pattern] = self._find(messages)
        text = self._joined(form, messages)
        return (self._rendered(form, messages) if text is None else text), form.turn_end

    def turn_end(self) -> str:
        """What the template puts after an assistant's content where nothing follows."""
        return _after_answer(self._render(_conversation(), False))

    def _joined(self, form: Continuation, messages: Sequence[TemplateMessage]) -> str | None:
        """The text without rendering; None where a content might be treated specially."""
        if form.literals is None or self._tests is None:
            return None
        contents = [message["content"] for message in messages]
        if form.is_stripped:
            contents = [content.strip() for content in contents]
        for content in contents:
            if not content or any(test in content for test in self._tests):
                return None
        return _interleave(form.literals, contents)

    def _rendered(self, form: Continuation, messages: Sequence[TemplateMessage]) -> str:
        if not form.is_calling:
            return _after_answer(self._render(_conversation(messages), True))
        conversation = _conversation(messages, is_calling=True)
        calling = _after_answer(self._render(conversation[:2], False))
        after = _after_answer(self._render(conversation, True))
        if not (calling.endswith(form.turn_end) and after.startswith(calling)):
            raise _unusable("it writes a call in another way once it is answered")
        return form.turn_end + after[len(calling) :]

    def _find(self, messages: Sequence[TemplateMessage]) -> Continuation:
        if messages[0]["role"] != "tool":
            return self._examine(messages, is_calling=False)
        try:
            return self._examine(messages, is_calling=True)
        except TemplateError as refusal:
            try:
                return self._examine(messages, is_calling=False)
            except TemplateError as error:
                if str(error) == str(refusal):
                    raise
                raise TemplateError(f"{error}; behind a tool call: {refusal}") from refusal

    def _examine(self, messages: Sequence[TemplateMessage], *, is_calling: bool) -> Continuation:
        """The form of messages like these, after a look at what the template does with them."""
        markers = [f"rolloutContentMarker{at}x" for at in range(len(messages))]
        marked = _with_contents(messages, markers)
        turn_end = self.turn_end()
        self._refuse_rewriting(_conversation(marked, is_calling=is_calling))
        form = Continuation(turn_end=turn_end, is_calling=is_calling)
        text = self._rendered(form, marked)
        literals = _split(text, markers, messages)
        turn_end = _common_prefix(turn_end, literals[0])
        form = Continuation(turn_end=turn_end, is_calling=is_calling)
        if not _writes_only_contents(messages, literals):
            return form
        for is_stripped in (False, True):
            known = msgspec.structs.replace(form, literals=literals, is_stripped=is_stripped)
            if all(self._is_foretold(known, messages, markers, probe) for probe in PROBES):
                return known
        return form

    def _refuse_rewriting(self, conversation: Sequence[TemplateMessage]) -> None:
        """Refuse a template under which new messages change what stands before them.

        The opening of the assistant's turn may change: templates of reasoning models leave out the
        reasoning of earlier turns, and an append-only transcript keeps what was sampled.
        """
        text = self._render(conversation, True)
        for marker, what in ((HISTORY, "user"), (ANSWER, "assistant")):
            if (times := text.count(marker)) != 1:
                raise _unusable(f"it writes an earlier {what} message {times} times")
        head = text.partition(HISTORY)[0]
        if ANSWER in head:
            raise _unusable("it changes the order of messages")
        if head != self._render(_conversation(), False).partition(HISTORY)[0]:
            raise _unusable("new messages change the text before the first message")

    def _is_foretold(
        self,
        form: Continuation,
        messages: Sequence[TemplateMessage],
        markers: Sequence[str],
        probe: tuple[str, str],
    ) -> bool:
        """Whether the literals give what the template renders for awkward contents."""
        contents = [f"{probe[0]}{marker}{probe[1]}" for marker in markers]
        expected = [content.strip() for content in contents] if form.is_stripped else contents
        assert form.literals is not None
        try:
            text = self._rendered(form, _with_contents(messages, contents))
        except TemplateError:
            return False
        return text == _interleave(form.literals, expected)


def _conversation(
    messages: Sequence[TemplateMessage] = (), *, is_calling: bool = False
) -> list[TemplateMessage]:
    """The made-up exchange, then `messages`; the assistant calls their tools if `is_calling`."""
    answer: TemplateMessage = {"role": "assistant", "content": ANSWER}
    if is_calling:
        results = itertools.takewhile(lambda message: message["role"] == "tool", messages)
        answer["tool_calls"] = [
            template_call(result.get("tool_call_id", f"call_{at}"), result.get("name", "tool"), {})
            for at, result in enumerate(results)
        ]
    return [{"role": "user", "content": HISTORY}, answer, *messages]


def _with_contents(
    messages: Sequence[TemplateMessage], contents: Sequence[str]
) -> list[TemplateMessage]:
    return [
        {**message, "content": content} for message, content in zip(messages, contents, strict=True)
    ]


def _after_answer(text: str) -> str:
    _, marker, after = text.partition(ANSWER)
    if not marker:
        raise _unusable("it leaves out the assistant's content")
    return after


def _split(
    text: str, markers: Sequence[str], messages: Sequence[TemplateMessage]
) -> tuple[str, ...]:
    literals = []
    for marker, message in zip(markers, messages, strict=True):
        literal, found, text = text.partition(marker)
        if not found or marker in text:
            times = "in another place or not at all" if not found else "more than once"
            raise _unusable(f"it writes the content of {message['role']!r} messages {times}")
        literals.append(literal)
    return (*literals, text)


def _writes_only_contents(messages: Sequence[TemplateMessage], literals: Sequence[str]) -> bool:
    """Whether nothing of the messages but role and content can be in the text around contents."""
    known = {"role", "content", "tool_call_id", "name"}
    if any(not known.issuperset(message) for message in messages):
        return False
    around = "\n".join(literals)
    names = [
        message[key]
        for message in messages
        for key in known & {"name", "tool_call_id"}
        if key in message
    ]
    return not any(str(name) in around for name in names)


def _interleave(literals: Sequence[str], contents: Sequence[str]) -> str:
    pieces = itertools.chain.from_iterable(zip(literals, contents, strict=False))
    return "".join(pieces) + literals[-1]


def _common_prefix(left: str, right: str) -> str:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return left[:length]


def _unusable(why: str) -> TemplateError:
    return TemplateError(f"the chat template cannot be used append-only: {why}")
