"""What a chat template puts after an assistant's turn.

An append-only transcript never renders its history again. What new messages add to it is found by
rendering them after a placeholder conversation, ``[user, assistant(marker), *new]``, and keeping
what follows the marker: the end of the assistant's turn, the messages, the generation prompt.

Whether a template can be used so is found out once for each pattern of messages (their roles and
keys), on contents of our own. The messages themselves are rendered each time.
"""

from __future__ import annotations

import itertools
import re
from array import array
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout.chat.encoding import TAG, TextEncoder, WrittenText
from rollout.chat.messages import TemplateMessage, template_call
from rollout.chat.reasoning import ends_with_opening
from rollout.chat.rendering import Render, render_escaped
from rollout.chat.transcript import common_length
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Letters only, so that templates which trim or JSON-encode contents leave them recognisable.
USER_MARKER = "rolloutUserMarker"
ASSISTANT_MARKER = "rolloutAnswerMarker"
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


class ContinuationRenderer:
    """Renders new messages as they follow a generated turn. Safe to use from several threads.

    Args:
        render_whole: What the template makes of messages.
        encoder: Knows the special tokens.
        source: The template.
    """

    def __init__(self, render_whole: Render, encoder: TextEncoder, source: str) -> None:
        self.render_whole = render_whole
        self.encoder = encoder
        self._source = source
        self._specials = frozenset(encoder.specials.values())
        self._encode_end = lru_cache(maxsize=16)(encoder.encode)
        self._patterns: dict[tuple[tuple[str, ...], ...], bool] = {}

    def render(
        self, messages: Sequence[TemplateMessage], max_tokens: int | None = None
    ) -> tuple[WrittenText, str, bool]:
        """What the messages add.

        Args:
            messages: As they follow a turn.
            max_tokens: Tokens that there is room for, the turn end included; None for any number.

        Returns:
            The text after the assistant's content; what of its beginning ends the assistant's turn,
            e.g. ``<|im_end|>\\n``, or nothing; whether the next turn begins inside reasoning.

        Raises:
            TemplateError: The template refuses such messages or cannot be used append-only.
            TooManyTokens: They certainly have more than `max_tokens`.
        """
        key = tuple([(message["role"], *message) for message in messages])
        is_calling = self._patterns.get(key)
        if is_calling is None:
            if len(self._patterns) >= _PATTERNS:
                self._patterns.clear()
            is_calling = self._patterns[key] = self._must_follow_call(messages)

        def render(marked: Sequence[TemplateMessage], _: object) -> str:
            return self._render_after(marked, is_calling)

        written = render_escaped(render, self.encoder, messages, None, max_tokens)
        turn_end = self.turn_ends.calls if is_calling else self._find_end(written.text)
        return written, turn_end, ends_with_opening(written.text)

    @cached_property
    def turn_ends(self) -> TurnEnds:
        """What the template puts after an assistant's turn where nothing follows.

        After calls: as a text ends, or else the last special token.

        Raises:
            TemplateError: It refuses such a conversation.
        """
        end = after_answer(self.render_whole(conversation(), False))
        after_calls = self._after_call
        if after_calls is None or after_calls.endswith(end):
            return TurnEnds(end, end)
        specials = list(self.encoder.pattern.finditer(after_calls))
        return TurnEnds(end, after_calls[specials[-1].start() :] if specials else end)

    @cached_property
    def _after_call(self) -> str | None:
        """What a turn has after its call; None where the template writes none in its history."""
        exchange = conversation([{"role": "tool", "content": ""}], is_calling=True)[:2]
        try:
            return after_answer(self.render_whole(exchange, False))
        except TemplateError:
            return None

    def stop_ids(self) -> Iterable[int]:
        """The special tokens that end a turn, in order, or else those that open the turns after."""
        return self._end_tokens or self._next_openings()

    def end_ids(self, *, is_call: bool) -> tuple[int, ...]:
        """The one that ends a turn with calls or without; none where nothing but the next does."""
        if not self._end_tokens:
            return ()
        ends = self.turn_ends
        return tuple(self._find_specials(ends.calls if is_call else ends.text)[:1])

    def past(self, ids: array[int], turn_end: str, after: Sequence[int]) -> int:
        """How many of the first `ids` need not follow `after`, because they end it already.

        Only a special token tells that a turn is over; text before it (a space, in some
        templates) is then past, and what comes after it may or may not have been sampled.
        """
        end = self._encode_end(turn_end)
        if not end or ids[: len(end)] != end:  # what follows may join its last token
            end = end[: common_length(ids, end)] or ids[:1]
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
        known = self.encoder.specials
        others = [known[name] for name in OTHER_ENDS if name in self._source and name in known]
        return dict.fromkeys(itertools.chain(*found, others))

    def _next_openings(self) -> Iterator[int]:
        """The special tokens that open other turns, where nothing else ends the assistant's."""
        for role in ("user", "tool"):
            with suppress(TemplateError):
                written, _, _ = self.render([{"role": role, "content": USER_MARKER}])
                yield from self._find_specials(written.text.partition(USER_MARKER)[0])[:1]

    def _find_specials(self, text: str) -> list[int]:
        return [token for token in self.encoder.encode(text) if token in self._specials]

    def _render_after(self, messages: Sequence[TemplateMessage], is_calling: bool) -> str:
        """The text after the assistant's content, which starts with the end of the turn."""
        exchange = conversation(messages, is_calling=is_calling)
        text = after_answer(self.render_whole(exchange, True))
        if not is_calling:
            return text
        alone, end = after_answer(self.render_whole(exchange[:2], False)), self.turn_ends.calls
        if not (alone.endswith(end) and text.startswith(alone)):
            raise unusable("it writes a call in another way once it is answered")
        return end + text[len(alone) :]

    def _find_end(self, after: str) -> str:
        """What of `after` ends the turn: some templates end it otherwise once something follows."""
        end = self.turn_ends.text
        if not end or after.startswith(end):
            return end
        special = self.encoder.pattern.search(after)
        other = "" if special is None else after[: special.end()]
        if end.startswith(other) or not self.encoder.pattern.search(end):
            return common_prefix(end, after, self.encoder)
        return other

    def _must_follow_call(self, messages: Sequence[TemplateMessage]) -> bool:
        """Whether messages like these must follow a call of their tools.

        Results do where the template then writes them in another way than after a text.

        Raises:
            TemplateError: The template refuses them or cannot be used append-only.
        """
        marked = [
            {**message, "content": f"rolloutContentMarker{at}x"}
            for at, message in enumerate(messages)
        ]
        may_call = messages[0]["role"] == "tool" and self._after_call is not None
        after, refusals = dict[bool, str](), list[TemplateError]()
        for is_calling in (True, False) if may_call else (False,):
            try:
                after[is_calling] = self._examine(marked, is_calling=is_calling)
            except TemplateError as error:
                refusals.append(error)
        if not after:
            raise refusals[0]
        return True in after and after[True] != after.get(False)

    def _examine(self, marked: Sequence[TemplateMessage], *, is_calling: bool) -> str:
        """What the template writes after the assistant's content where messages hold markers.

        Refuse a template under which they change what stands before them. The opening of the
        assistant's turn may change: templates of reasoning models leave out the reasoning of
        earlier turns, and an append-only transcript keeps what was sampled.
        """
        roles = {USER_MARKER: "user", ASSISTANT_MARKER: "assistant"}
        roles |= {message["content"]: message["role"] for message in marked}
        text = self.render_whole(conversation(marked, is_calling=is_calling), True)
        found = re.findall("|".join(roles), text)
        if found != list(roles):
            expected, written = ", ".join(roles.values()), ", ".join(map(roles.__getitem__, found))
            raise unusable(f"it writes the contents of [{expected}] as those of [{written}]")
        head, user, _ = self.render_whole(conversation(), False).partition(USER_MARKER)
        if not text.startswith(head + user):
            raise unusable("new messages change the text before the first message")
        return self._render_after(marked, is_calling)


def conversation(
    messages: Sequence[TemplateMessage] = (), *, is_calling: bool = False
) -> list[TemplateMessage]:
    """The exchange, then `messages`; an assistant that is calling calls their tools.

    Beside a call some templates leave out the content, so that the marker is an argument then.
    """
    turn: TemplateMessage = {"role": "assistant", "content": ASSISTANT_MARKER}
    if is_calling:
        calls = list_answered_calls(messages)
        calls[0]["function"]["arguments"] = {"marker": ASSISTANT_MARKER}
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
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
