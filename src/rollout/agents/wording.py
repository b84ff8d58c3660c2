"""What a trajectory's messages are in tokens, and whether there is room for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.agents.budget import length_error, longest_prompt, prompt_fault, remaining
from rollout.agents.identity import RejectedPrompt
from rollout.agents.long_texts import LONG_TOKENS, is_long
from rollout.chat.messages import as_messages
from rollout.chat.token_bounds import TooManyTokens
from rollout.errors import LimitExceeded, TemplateError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from rollout.agents.message_log import MessageLog
    from rollout.agents.services import Services
    from rollout.chat.drift import Drift
    from rollout.chat.transcript import Transcript
    from rollout.tools import TrajectoryTools
    from rollout.types import Message

    #: Messages as agents give them.
    Given = Sequence[Message | Mapping[str, Any]]
    #: Ids, and the messages that they are of.
    Worded = tuple[array[int], list[Message]]

#: Messages of an observation whose lengths are looked at before it is rendered.
_LOOKED_AT = 64


class Wording:
    """Renders and encodes for one trajectory: short texts at once, long ones beside the loop."""

    def __init__(self, services: Services, tools: TrajectoryTools) -> None:
        self._services = services
        self._tools = tools

    async def prompt(self, messages: Given) -> Worded:
        """The prompt's ids and messages.

        Raises:
            RejectedPrompt: They cannot be rendered, or are more than fits.
        """
        lengths, context = self._services.config.lengths, self._services.engines.info.context_length
        longest = longest_prompt(lengths, context)
        try:
            ids, plain = await self._services.texts.run(
                is_long(messages, self._services.texts.prompt_room),
                *(self._prompt, messages, longest),
            )
        except TooManyTokens as error:
            raise prompt_fault(f"at least {error.least}", lengths, context) from None
        except TemplateError as error:
            raise RejectedPrompt("bad_message", str(error)) from error
        if len(ids) > longest:
            raise prompt_fault(str(len(ids)), lengths, context)
        return ids, plain

    async def observation(
        self, messages: Given, transcript: Transcript, after: Sequence[int] | None
    ) -> Worded:
        """The ids and messages of an observation; `after` as in `ChatTemplate.observation_ids`.

        Raises:
            LimitExceeded: They would leave no room for one more token.
        """
        room = self.room(transcript)
        return await self._services.texts.run(
            is_long(messages), self._observation, messages, room, after
        )

    def observation_now(
        self, messages: Given, transcript: Transcript, after: Sequence[int] | None
    ) -> Worded | None:
        """The same of a short text; None of a long one that may have room.

        Raises:
            LimitExceeded: It certainly has none.
        """
        room, source = self.room(transcript)
        if not is_long(messages):
            return self._observation(messages, (room, source), after)
        if len(messages) <= _LOOKED_AT:
            try:
                self._services.template.refuse_beyond(room - 1, messages)
            except TooManyTokens as error:
                raise _no_room(source, f"at least {error.least}") from None
        return None

    async def row(self, log: MessageLog) -> Transcript:
        """The whole conversation rendered again, as `MessageLog.row` makes it.

        Raises:
            TemplateError: The template refuses the conversation.
            LimitExceeded: It leaves no room for a token.
        """
        lengths, context = self._services.config.lengths, self._services.engines.info.context_length
        most = min(lengths.prompt + lengths.response, context)
        tools = self._tools.schemas or None
        try:
            row = await self._services.texts.run(
                is_long(log.messages, self._services.texts.prompt_room),
                *(log.row, self._services.template, tools, lengths.prompt, most),
            )
        except TooManyTokens:
            source = "engine.context_length" if most == context else "lengths.response"
            raise _no_room_anew(source) from None
        room, source = self.room(row)
        if room < 1:
            raise _no_room_anew(source)
        return row

    async def drift(
        self, transcript: Transcript, messages: list[Message], said: Mapping[int, str]
    ) -> Drift:
        """See `ChatTemplate.drift`."""
        return await self._services.texts.run(
            len(transcript) > LONG_TOKENS,
            self._services.template.drift,
            *(transcript, messages, said, self._tools.schemas or None),
        )

    def room(self, transcript: Transcript) -> tuple[int, str]:
        """Tokens that may still be appended, and the path of the length that bounds them."""
        context_length = self._services.engines.info.context_length
        return remaining(transcript, self._services.config.lengths, context_length)

    def _prompt(self, messages: Given, longest: int) -> Worded:
        tools = self._tools.schemas or None
        ids = self._services.template.prompt_ids(messages, tools, most=longest)
        return ids, as_messages(messages)

    def _observation(
        self, messages: Given, room: tuple[int, str], after: Sequence[int] | None
    ) -> Worded:
        most, source = room
        try:
            ids = self._services.template.observation_ids(messages, after=after, most=most - 1)
        except TooManyTokens as error:
            raise _no_room(source, f"at least {error.least}") from None
        if len(ids) >= most:
            raise _no_room(source, str(len(ids)))
        return ids, as_messages(messages)


def _no_room(source: str, count: str) -> LimitExceeded:
    return length_error(source, f"an observation of {count} tokens does not fit")


def _no_room_anew(source: str) -> LimitExceeded:
    return length_error(source, "the conversation rendered again leaves no room for a token")
