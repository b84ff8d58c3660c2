"""A conversation as a serving stack keeps it: messages, parsed, to be rendered again each turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollout.chat.messages import template_messages, with_results_as_user
from rollout.chat.token_bounds import TooManyTokens
from rollout.chat.transcript import Transcript
from rollout.errors import TemplateError
from rollout.types import InvalidToolCall, ToolCall
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Sequence

    from rollout.chat import ChatTemplate, ParsedTurn
    from rollout.types import Message


class MessageLog:
    """The messages of a trajectory, and the prompt that it began with.

    Attributes:
        messages: As they were given, and as the model's turns were parsed.
    """

    def __init__(self) -> None:
        self.messages: list[Message | Mapping[str, Any]] = []
        self._start = self._turn = 0
        self._prompt: Sequence[int] = ()

    def begin(self, messages: Iterable[Message | Mapping[str, Any]], ids: Sequence[int]) -> None:
        """The prompt, and its tokens."""
        self.messages = list(messages)
        self._start = len(self.messages)
        self._prompt = ids

    def say(self, turn: Mapping[str, Any]) -> None:
        """What the model said."""
        self._turn = len(self.messages)
        self.messages.append(turn)

    def add(self, messages: Iterable[Message | Mapping[str, Any]]) -> None:
        """What was said to it since."""
        self.messages += messages

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
        shared = next(
            (at for at, (a, b) in enumerate(zip(ids, self._prompt, strict=False)) if a != b),
            min(len(ids), len(self._prompt)),
        )
        shared = shared or min(longest, len(ids))
        row = Transcript()
        row.append_prompt(ids[:shared])
        row.append_observation(ids[shared:])
        return row

    def _ids(
        self, template: ChatTemplate, tools: Sequence[Mapping[str, Any]] | None, most: int
    ) -> array[int]:
        """The ids of all messages; the last turn or all, and what answered, plain if they must be.

        Some templates refuse two calls in a turn, or an answer that no call precedes: what a
        model can write must not fail its trajectory.
        """
        try:
            return template.prompt_ids(self.messages, tools, most=most)
        except TooManyTokens:
            raise
        except TemplateError as refusal:
            for at in (self._turn, self._start):
                plain = [*self.messages[:at], *in_plain_words(self.messages[at:])]
                try:
                    ids = template.prompt_ids(plain, tools, most=most)
                except TooManyTokens:
                    raise
                except TemplateError:
                    continue
                self.messages = plain
                return ids
            raise refusal


def in_plain_words(
    messages: Iterable[Message | Mapping[str, Any]],
) -> list[Message | Mapping[str, Any]]:
    """The messages with calls as the text that they are, and tools' answers as a user's words."""
    return list(with_results_as_user(template_messages(map(_in_plain_words, messages))))


def _in_plain_words(message: Message | Mapping[str, Any]) -> Message | Mapping[str, Any]:
    if not isinstance(message, Mapping) or not message.get("tool_calls"):
        return message
    calls = [call.raw for call in message["tool_calls"] if isinstance(call, ToolCall)]
    words = [message["content"], *calls]
    return {**message, "content": encodable("\n".join(filter(None, words))), "tool_calls": ()}


def said_again(
    parsed: ParsedTurn, calls: Sequence[ToolCall | InvalidToolCall]
) -> Mapping[str, Any]:
    """A turn as a server would send it back: text, reasoning and calls apart.

    What could not be parsed stays in the text, as written.
    """
    invalid = [call.raw for call in calls if isinstance(call, InvalidToolCall)]
    return {
        "role": "assistant",
        "content": encodable("\n".join(filter(None, [parsed.content, *invalid]))),
        "reasoning_content": parsed.reasoning,
        "tool_calls": [call for call in calls if isinstance(call, ToolCall)],
    }
