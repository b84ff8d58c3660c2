"""The messages of a conversation, and how they are rendered again as a serving stack does."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.agents.kept_messages import KeptMessages
from rollout.agents.turn import written_content
from rollout.chat.encoding import TooManyTokens
from rollout.chat.messages import template_messages, with_results_as_user
from rollout.chat.transcript import Transcript, append_split, common_length
from rollout.errors import TemplateError
from rollout.media import Media
from rollout.token_prefix import TokenPrefix
from rollout.types import Message, ToolCall
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Mapping, Sequence

    from rollout.agents.turn import AssistantTurn
    from rollout.chat import ChatTemplate


class MessageLog(msgspec.Struct, eq=False):
    """The messages of a conversation, and which of them the model said.

    Attributes:
        messages: All of them.
    """

    messages: KeptMessages
    _start: int = 0
    _prompt: TokenPrefix | None = None  # holds it, at its beginning
    _prompt_length: int = 0
    _plain: Collection[int] = ()  # what the template takes in plain words only

    @property
    def said(self) -> dict[int, str]:
        """What the model sampled, decoded, by its place in `messages`."""
        return {at: self.messages.turn(at).text for at in self.messages.said}

    def begin(self, messages: Iterable[Message], tokens: TokenPrefix) -> None:
        """The prompt, and its tokens."""
        self.messages.add(messages)
        self._start = len(self.messages)
        self._prompt, self._prompt_length = tokens, tokens.length

    def fork(self, count: int) -> MessageLog:
        """One that has the first `count` messages of this one."""
        forked = copy.copy(self)
        forked.messages = self.messages.fork(count)
        forked._start = min(self._start, count)
        forked._plain = {at for at in self._plain if at < count} or ()
        return forked

    def row(
        self,
        template: ChatTemplate,
        tools: Sequence[Mapping[str, Any]] | None,
        longest: int,
        most: int,
    ) -> Transcript:
        """A transcript that begins with the whole conversation rendered again.

        Its prompt is what it shares with the first prompt, so that it fits where that one fits (at
        most `longest` tokens where they share nothing); the rest is an observation.

        Raises:
            TemplateError: The template refuses the conversation.
            TooManyTokens: It certainly has more than `most`.
        """
        ids = self._ids(template, tools, most)
        assert self._prompt is not None
        prompt = self._prompt.slice(0, self._prompt_length)
        shared = common_length(ids, prompt) or min(longest, len(ids))
        row = Transcript()
        shown = [part for each in self.messages for part in each.parts]
        media = [part for part in shown if isinstance(part, Media)]
        append_split(row, ids, template.places_of(ids, media), shared)
        return row

    def _ids(
        self, template: ChatTemplate, tools: Sequence[Mapping[str, Any]] | None, most: int
    ) -> array[int]:
        """The ids of all messages; the last turn or all, and what answered, plain if they must be.

        Some templates refuse two calls in a turn, or an answer that no call precedes: what a
        model can write must not fail its trajectory.
        """
        try:
            return template.prompt_ids(self._as_served(self._plain), tools, max_tokens=most)
        except TooManyTokens:
            raise
        except TemplateError as refusal:
            for start in (max(self.messages.said, default=0), self._start):
                plain = {*self._plain, *range(start, len(self.messages))}
                try:
                    ids = template.prompt_ids(self._as_served(plain), tools, max_tokens=most)
                except TooManyTokens:
                    raise
                except TemplateError:
                    continue
                self._plain = plain
                return ids
            raise refusal

    def _as_served(self, plain: Collection[int]) -> list[Message | Mapping[str, Any]]:
        """The messages as a server would be sent them, some in plain words."""
        served: list[Message | Mapping[str, Any]] = []
        run: list[Message | Mapping[str, Any]] = []
        is_said = set(self.messages.said)
        for at in range(len(self.messages)):
            again = said_again(self.messages.turn(at)) if at in is_said else self.messages[at]
            if at in plain:
                run.append(again)
                continue
            served += in_plain_words(run)
            served.append(again)
            run = []
        return served + in_plain_words(run)


def in_plain_words(
    messages: Sequence[Message | Mapping[str, Any]],
) -> list[Message | Mapping[str, Any]]:
    """The messages with calls as the text that they are, and tools' answers as a user's words."""
    if not messages:
        return []
    return list(with_results_as_user(template_messages(list(map(_in_plain_words, messages)))))


def _in_plain_words(message: Message | Mapping[str, Any]) -> Message | Mapping[str, Any]:
    if isinstance(message, Message) or not message["tool_calls"]:
        return message
    words = [message["content"], *(call.raw for call in message["tool_calls"])]
    return {**message, "content": encodable("\n".join(filter(None, words))), "tool_calls": ()}


def said_again(turn: AssistantTurn) -> Mapping[str, Any]:
    """A turn as a server would send it back: text, reasoning and calls apart.

    What could not be parsed stays in the text, as written.
    """
    return {
        "role": "assistant",
        "content": written_content(turn),
        "reasoning_content": turn.reasoning,
        "tool_calls": [call for call in turn.calls if isinstance(call, ToolCall)],
    }
