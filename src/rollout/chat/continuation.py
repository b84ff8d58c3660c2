"""What a chat template puts after an assistant's turn.

An append-only transcript never renders its history again. What new messages add to it is found by
rendering them after a placeholder conversation, ``[user, assistant(marker), *new]``, and keeping
what follows the marker: the end of the assistant's turn, the messages, the generation prompt.

Whether a template can be used so is found out once for each pattern of messages (their roles and
keys), on contents of our own. The messages themselves are rendered each time.
"""

from __future__ import annotations

import itertools
from array import array
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rollout.chat.encoding import TAG, WrittenText
from rollout.chat.messages import template_call
from rollout.chat.reasoning import ends_with_opening, opens_reasoning
from rollout.chat.rendering import render_escaped
from rollout.chat.transcript import common_length
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rollout.chat.encoding import TextEncoder
    from rollout.chat.messages import TemplateMessage
    from rollout.chat.rendering import Render

#: Letters only, so that templates which trim or JSON-encode contents leave them recognisable.
USER_MARKER = "rolloutUserMarker"
ASSISTANT_MARKER = "rolloutAnswerMarker"
#: What the placeholder assistant says: text; text and calls, since some templates refuse results
#: without a call; or calls alone, since some write the text after the results (Gemma 4).
Answer = Literal["words", "words and calls", "calls"]
#: Ends of a turn that some templates never write, or only of turns that call what they know.
OTHER_ENDS = ("<|eom_id|>",)
#: Patterns of messages that are remembered: clients of a gateway choose the keys.
_PATTERNS = 1024


class TurnEnds(NamedTuple):
    """What a template puts after an assistant's content where nothing follows.

    Attributes:
        text: After a text, e.g. ``<|im_end|>\\n``; empty where only the next turn ends one.
        calls: After tool calls, e.g. ``<|call|>``.
    """

    text: str
    calls: str


class Continuation(NamedTuple):
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
        source: The template.
    """

    def __init__(self, render: Render, encoder: TextEncoder, source: str) -> None:
        self._render = render
        self._encoder = encoder
        self._source = source
        self._specials = frozenset(encoder.specials.values())
        self._patterns: dict[tuple[object, ...], tuple[Answer, str, bool]] = {}
        self._calls = lru_cache(maxsize=256)(self._render_calls)
        self._turn_end_ids = lru_cache(maxsize=16)(encoder.encode)

    def render(
        self, messages: Sequence[TemplateMessage], max_tokens: int | None = None
    ) -> Continuation:
        """What the messages add.

        Args:
            messages: As they follow a turn.
            max_tokens: Tokens that there is room for, the turn end included; None for any number.

        Raises:
            TemplateError: The template refuses such messages or cannot be used append-only.
            TooManyTokens: They certainly have more than `max_tokens`.
        """
        key = tuple([(message["role"], *sorted(message)) for message in messages])
        pattern = self._patterns.get(key)
        if pattern is None:
            if len(self._patterns) >= _PATTERNS:
                self._patterns.clear()
            answer, opening = self._find_answer(messages)
            pattern = self._patterns[key] = answer, opening, opens_reasoning(opening)
        answer, opening, opens = pattern
        turn_end = ""

        def render(marked: Sequence[TemplateMessage], _: object) -> str:
            nonlocal turn_end
            text, turn_end = self._render_after(answer, marked)
            return text

        written = render_escaped(render, self._encoder, messages, None, max_tokens)
        if not written.text.endswith(opening):
            opens = ends_with_opening(written.text)
        return Continuation(written, turn_end, opens)

    @cached_property
    def turn_ends(self) -> TurnEnds:
        """What the template puts after an assistant's turn where nothing follows.

        After calls: as a text ends, or else the last special token.

        Raises:
            TemplateError: It refuses such a conversation.
        """
        end = after_answer(self._render(conversation(), False))
        result = {"role": "tool", "content": ""}
        try:
            calling = self._render(conversation([result], "words and calls")[:2], False)
        except TemplateError:
            return TurnEnds(end, end)
        specials = list(self._encoder.pattern.finditer(calling))
        if calling.endswith(end) or not specials:
            return TurnEnds(end, end)
        return TurnEnds(end, calling[specials[-1].start() :])

    def stop_ids(self) -> Iterable[int]:
        """The special tokens that end a turn, in order, or else those that open the turns after."""
        return self._end_tokens or self._next_openings()

    def end_ids(self, *, is_call: bool) -> tuple[int, ...]:
        """The one that ends a turn with calls or without; none where nothing but the next does."""
        if not self._end_tokens:
            return ()
        ends = self.turn_ends
        return tuple(self._find_specials(ends.calls if is_call else ends.text)[:1])

    def past(self, ids: Sequence[int], turn_end: str, after: Sequence[int]) -> int:
        """How many of the first `ids` need not follow `after`, because they end it already.

        Only a special token tells that a turn is over; text before it (a space, in some
        templates) is then past, and what comes after it may or may not have been sampled.
        """
        end = self._turn_end_ids(turn_end)  # of which `ids` start with a part
        end = end[: common_length(ids, end)] or array("i", ids[:1])
        special = 0
        while special < len(end) and end[special] not in self._specials:
            special += 1
        tail = array("i", after[-len(end) :])
        for stop in range(len(end), special, -1):
            if tail[special - stop :] == end[special:stop]:
                return stop
        # The model may end a turn by another token than a template that continues (harmony).
        return special + 1 if turn_end and int(after[-1]) in self._end_tokens else 0

    @cached_property
    def _end_tokens(self) -> dict[int, None]:
        """Those that end a turn, in order; empty where only the next turn does."""
        try:
            ends = self.turn_ends
        except TemplateError:  # a template without answers still renders prompts
            return {}
        found = [self._find_specials(text)[:1] for text in ends] if ends.text else []
        known = self._encoder.specials
        others = [known[name] for name in OTHER_ENDS if name in self._source and name in known]
        return dict.fromkeys(itertools.chain(*found, others))

    def _next_openings(self) -> Iterator[int]:
        """The special tokens that open other turns, where nothing else ends the assistant's."""
        for role in ("user", "tool"):
            with suppress(TemplateError):
                added = self.render([{"role": role, "content": USER_MARKER}])
                yield from self._find_specials(added.written.text.partition(USER_MARKER)[0])[:1]

    def _find_specials(self, text: str) -> list[int]:
        return [token for token in self._encoder.encode(text) if token in self._specials]

    def _render_after(self, answer: Answer, messages: Sequence[TemplateMessage]) -> tuple[str, str]:
        """The text after the assistant's content, and the turn end that it starts with."""
        ends = self.turn_ends
        exchange = conversation(messages, answer)
        text = self._render(exchange, True)
        if answer == "words":
            after = after_answer(text)
            return after, self._find_end(after, ends.text)
        if ASSISTANT_MARKER in text:  # what stands before it may change, see `_examine`
            key = [(call["id"], call["function"]["name"]) for call in exchange[1]["tool_calls"]]
            calling, text = self._calls(tuple(key)), after_answer(text)
        else:
            calling = self._render(exchange[:2], False)
        if not (calling.endswith(ends.calls) and text.startswith(calling)):
            raise unusable("it writes a call in another way once it is answered")
        return ends.calls + text[len(calling) :], ends.calls

    def _render_calls(self, calls: tuple[tuple[str, str], ...]) -> str:
        """What the placeholder turn has after its content, where nothing follows these calls."""
        question, answer = conversation()
        answer["tool_calls"] = [template_call(call_id, name, {}) for call_id, name in calls]
        return after_answer(self._render([question, answer], False))

    def _find_end(self, after: str, end: str) -> str:
        """What of `after` ends the turn: some templates end it otherwise once something follows."""
        if not end or after.startswith(end):
            return end
        special = self._encoder.pattern.search(after)
        other = "" if special is None else after[: special.end()]
        if end.startswith(other) or not self._encoder.pattern.search(end):
            return common_prefix(end, after, self._encoder)
        return other

    def _find_answer(self, messages: Sequence[TemplateMessage]) -> tuple[Answer, str]:
        """The answer that messages like these can follow, and what follows their last content.

        Raises:
            TemplateError: The template refuses them or cannot be used append-only.
        """
        if messages[0]["role"] != "tool":
            return "words", self._examine(messages, "words")
        answers: tuple[Answer, ...] = ("words and calls", "calls", "words")
        refusals = []
        for answer in answers:
            try:
                return answer, self._examine(messages, answer)
            except TemplateError as error:
                refusals.append(error)
        calling, _, plain = refusals
        if str(calling) == str(plain):
            raise plain
        raise TemplateError(f"{plain}; after a tool call: {calling}") from calling

    def _examine(self, messages: Sequence[TemplateMessage], answer: Answer) -> str:
        """The opening of the turn after messages like these.

        Refuse a template under which they change what stands before them. The opening of the
        assistant's turn may change: templates of reasoning models leave out the reasoning of
        earlier turns, and an append-only transcript keeps what was sampled. Contents beside a call
        are left out by some, and nothing of ours follows them.
        """
        markers = [f"rolloutContentMarker{at}x" for at in range(len(messages))]
        marked = [
            {**message, "content": marker}
            for message, marker in zip(messages, markers, strict=True)
        ]
        text = self._render(conversation(marked, answer), True)
        if answer == "words":
            after_answer(text)
        for marker, what in ((USER_MARKER, "user"), (ASSISTANT_MARKER, "assistant")):
            times = text.count(marker)
            if times != 1 and not (what == "assistant" and answer != "words" and times == 0):
                raise unusable(f"it writes an earlier {what} message {times} times")
        head = text.partition(USER_MARKER)[0]
        if ASSISTANT_MARKER in head:
            raise unusable("it changes the order of messages")
        if head != self._render(conversation(), False).partition(USER_MARKER)[0]:
            raise unusable("new messages change the text before the first message")
        rest, _ = self._render_after(answer, marked)
        for marker, message in zip(markers, messages, strict=True):
            _, found, rest = rest.partition(marker)
            if not found or marker in rest:
                how = "in another place or not at all" if not found else "more than once"
                raise unusable(f"it writes the content of {message['role']!r} messages {how}")
        return rest


def conversation(
    messages: Sequence[TemplateMessage] = (), answer: Answer = "words"
) -> list[TemplateMessage]:
    """The exchange, then `messages`; where the assistant calls, it calls their tools."""
    content = "" if answer == "calls" else ASSISTANT_MARKER
    turn: TemplateMessage = {"role": "assistant", "content": content}
    if answer != "words":
        turn["tool_calls"] = list_answered_calls(messages)
    return [{"role": "user", "content": USER_MARKER}, turn, *messages]


def list_answered_calls(messages: Iterable[TemplateMessage]) -> list[dict[str, Any]]:
    """The calls that the results answer with which `messages` begin."""
    results = itertools.takewhile(lambda message: message["role"] == "tool", messages)
    return [
        template_call(result.get("tool_call_id", f"call_{at}"), result.get("name", "tool"), {})
        for at, result in enumerate(results)
    ]


def after_answer(text: str) -> str:
    _, marker, after = text.partition(ASSISTANT_MARKER)
    if not marker:
        raise unusable("it leaves out the assistant's content")
    return after


def unusable(why: str) -> TemplateError:
    return TemplateError(f"the chat template cannot be used append-only: {why}")


def common_prefix(left: str, right: str, encoder: TextEncoder) -> str:
    """What both texts begin with, in whole special tokens and whole tags."""
    length = common_length(left, right)
    for text in (left, right):
        for match in (*encoder.pattern.finditer(text), *TAG.finditer(text)):
            if match.start() < length < match.end():
                length = match.start()
    return left[:length]
