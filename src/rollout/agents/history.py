"""A conversation as a serving stack keeps it: messages, parsed, to be rendered anew each turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.chat.transcript import Transcript
from rollout.types import InvalidToolCall, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rollout.chat import ChatTemplate, ParsedTurn
    from rollout.types import Message


class History:
    """The messages of a trajectory, and the prompt that it began with.

    Attributes:
        messages: As they were given, and as the model's turns were parsed.
    """

    def __init__(self) -> None:
        self.messages: list[Message | Mapping[str, Any]] = []
        self._prompt: Sequence[int] = ()

    def begin(self, messages: Iterable[Message | Mapping[str, Any]], ids: Sequence[int]) -> None:
        """The prompt, and its tokens."""
        self.messages = list(messages)
        self._prompt = ids

    def add(self, messages: Iterable[Message | Mapping[str, Any]]) -> None:
        """What was said since."""
        self.messages += messages

    def row(
        self,
        template: ChatTemplate,
        tools: Sequence[Mapping[str, Any]] | None,
        longest: int,
        most: int,
    ) -> Transcript:
        """A transcript that begins with the whole conversation rendered anew.

        Its prompt is what it shares with the first prompt, so that it fits where that one fits (at
        most `longest` tokens where they share nothing); the rest is an observation.

        Raises:
            TemplateError: The template refuses the conversation.
            TooManyTokens: It certainly has more than `most`.
        """
        ids = template.prompt_ids(self.messages, tools, most=most)
        shared = next(
            (at for at, (a, b) in enumerate(zip(ids, self._prompt, strict=False)) if a != b),
            min(len(ids), len(self._prompt)),
        )
        shared = shared or min(longest, len(ids))
        row = Transcript()
        row.append_prompt(ids[:shared])
        row.append_observation(ids[shared:])
        return row


def said_again(
    parsed: ParsedTurn, calls: Sequence[ToolCall | InvalidToolCall]
) -> Mapping[str, Any]:
    """A turn as a server would send it back: text, reasoning and calls apart.

    What could not be parsed stays in the text, as written.
    """
    invalid = [call.raw for call in calls if isinstance(call, InvalidToolCall)]
    return {
        "role": "assistant",
        "content": "\n".join([parsed.content, *invalid] if parsed.content else invalid),
        "reasoning_content": parsed.reasoning,
        "tool_calls": [call for call in calls if isinstance(call, ToolCall)],
    }
