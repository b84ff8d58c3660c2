"""What a trajectory's messages are in tokens, and whether there is room for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout.agents.budget import length_error, longest_prompt, prompt_fault, remaining
from rollout.agents.identity import RejectedPrompt
from rollout.agents.kept_messages import TurnReader, find_texts
from rollout.agents.long_texts import is_long, room_beside
from rollout.agents.media_intake import may_show
from rollout.agents.places import check_ids
from rollout.chat.encoding import TooManyTokens
from rollout.chat.messages import as_messages
from rollout.chat.reasoning import opens_reasoning
from rollout.chat.result_order import order_messages
from rollout.errors import AgentError, LimitExceeded, MediaError, TemplateError
from rollout.media.records import find_shown
from rollout.types import Message

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from rollout.agents.message_log import MessageLog
    from rollout.agents.services import Services
    from rollout.chat import ChatTemplate
    from rollout.chat.drift import Drift
    from rollout.chat.transcript import Transcript
    from rollout.media import Media, PlacedMedia

#: Messages as agents give them.
Given = Sequence[Message | Mapping[str, Any]]
#: Of tools, as OpenAI has them.
Schemas = Sequence[Mapping[str, Any]]


class Worded(NamedTuple):
    """Messages in tokens.

    Attributes:
        ids: What they add to a transcript.
        messages: The messages themselves, in the form in which a conversation keeps them.
        opens_reasoning: Whether the turn after them begins inside reasoning.
        found: Of an observation: how far from its end the text of each message begins in the text
            of the ids; -1 where it does not stand there exactly.
        is_raw: The ids are not what the template makes of the messages.
        cut_tokens: Tokens that a prompt has lost at its beginning.
        media: Images and videos with their places among the ids.
    """

    ids: array[int]
    messages: list[Message]
    opens_reasoning: bool
    found: Sequence[int] = ()
    is_raw: bool = False
    cut_tokens: int = 0
    media: tuple[PlacedMedia, ...] = ()


class Wording:
    """Renders and encodes where certain tools are offered: short texts at once, long ones beside
    the loop.

    Attributes:
        reader: Decodes and parses what the model says where these tools are offered.
        kept_tokens: Room that is kept free.
    """

    __slots__ = ("_services", "_short", "kept_tokens", "reader")

    def __init__(self, services: Services, reader: TurnReader) -> None:
        self._services = services
        self._short = room_beside(reader.schemas)
        self.reader = reader
        self.kept_tokens = 0

    def keeping(self, tokens: int) -> Wording:
        """The same where so many tokens are kept free."""
        other = copy(self)
        other.kept_tokens = tokens
        return other

    async def prompt(
        self, messages: Given, *, is_continued: bool = False, is_shared: bool = False
    ) -> Worded:
        """The prompt's ids and messages.

        Args:
            messages: At least one.
            is_continued: The model has spoken in them before, so that they may take the room of
                its answers too.
            is_shared: Other trajectories begin with the same list.

        Raises:
            RejectedPrompt: They cannot be rendered, or are more than fits.
        """
        lengths, context = self._services.config.lengths, self._services.engines.info.context_length
        longest = longest_prompt(lengths, context)
        if is_continued:
            longest = min(lengths.prompt + lengths.response - 1, context - 1)
        is_cut = lengths.overlong_prompts == "cut" and not is_continued
        try:
            shown = await self._services.media.prepared(messages, is_shared=is_shared)
            worded = await self._rendered(shown, None if is_cut else longest)
        except TooManyTokens as error:
            raise prompt_fault(f"at least {error.least}", lengths, context) from None
        except TemplateError as error:
            raise RejectedPrompt("bad_message", str(error)) from error
        if len(worded.ids) <= longest:
            return worded
        if not is_cut or worded.media:  # a picture cannot be cut in two
            raise prompt_fault(str(len(worded.ids)), lengths, context)
        cut = len(worded.ids) - longest
        return worded._replace(ids=worded.ids[cut:], is_raw=True, cut_tokens=cut)

    def raw_prompt(self, ids: Sequence[int], messages: Given) -> Worded:
        """A prompt that its agent has put into tokens.

        Args:
            ids: At least one.
            messages: Those that it stands for; of those that cannot be read, none are kept.

        Raises:
            AgentError: They are no ids, or none.
            RejectedPrompt: It is more than fits.
        """
        lengths, info = self._services.config.lengths, self._services.engines.info
        packed = check_ids(ids, info.vocab_size, "begin")
        if not packed:
            raise AgentError("begin: no ids; expected those of a prompt")
        if len(packed) > longest_prompt(lengths, info.context_length):
            raise prompt_fault(str(len(packed)), lengths, info.context_length)
        return self._raw(packed, messages)

    def raw_opening(self, ids: array[int]) -> Worded:
        """What another conversation begins with, put into tokens by its agent.

        Raises:
            LimitExceeded: It is more than fits.
        """
        lengths, context = self._services.config.lengths, self._services.engines.info.context_length
        most, source = context, "engine.context_length"
        if lengths.prompt + lengths.response < context:
            most, source = lengths.prompt + lengths.response, "lengths.response"
        if len(ids) >= most:
            raise no_room(source, str(len(ids)))
        return self._raw(ids, ())

    def _raw(self, ids: array[int], messages: Given) -> Worded:
        try:
            own = as_messages(messages) if messages else []
        except (TemplateError, MediaError):
            own = []
        return Worded(ids, own, opens_reasoning(self._services.template.decode(ids)), is_raw=True)

    async def _rendered(self, messages: Given, longest: int | None) -> Worded:
        """A prompt's ids; of one that certainly has more than `longest`, TooManyTokens."""
        texts = self._services.texts
        if may_show(messages):
            return await self._shown(self._prompt, messages, longest)
        if is_long(messages, self._short):
            return await texts.run(True, self._prompt, messages, longest)
        return self._prompt(messages, longest)

    async def observation(
        self, messages: Given, transcript: Transcript, after: Sequence[int] | None
    ) -> Worded:
        """The ids and messages of an observation; `after` as in `ChatTemplate.observation_ids`.

        Raises:
            LimitExceeded: They would leave no room for one more token.
        """
        room, texts = self.room(transcript), self._services.texts
        if may_show(messages):
            before = [each.medium for each in transcript.media]
            messages = await self._services.media.prepared(messages, len(before))
            return await self._shown(self._observation, messages, room, after, before)
        return await texts.run(is_long(messages), self._observation, messages, room, after)

    async def _shown(self, render: Callable[..., Worded], *args: Any) -> Worded:
        """What is rendered with images or videos, of which a processor makes tokens."""
        if self._services.template.processor is None:
            return render(*args)  # it is refused
        worded: Worded = await self._services.media.run(render, *args)
        return worded

    def observation_now(
        self, messages: Given, transcript: Transcript, after: Sequence[int] | None
    ) -> Worded | Given:
        """The same of a short text; of a long one the messages, for later.

        Raises:
            LimitExceeded: There is no room for it.
        """
        if may_show(messages) and self._services.template.processor is not None:
            return messages
        if is_long(messages):
            return as_messages(messages)
        return self._observation(messages, self.room(transcript), after)

    async def row(self, log: MessageLog) -> Transcript:
        """The whole conversation rendered again, as `MessageLog.row` makes it.

        Raises:
            TemplateError: The template refuses the conversation.
            LimitExceeded: It leaves no room for a token.
        """
        lengths, context = self._services.config.lengths, self._services.engines.info.context_length
        most = min(lengths.prompt + lengths.response, context)
        tools = self._schemas
        try:
            row = await self._services.texts.run(
                is_long(log.messages, self._short),
                *(log.row, self._services.template, tools, lengths.prompt, most),
            )
        except TooManyTokens:
            source = "engine.context_length" if most == context else "lengths.response"
            raise _no_room_rendered(source) from None
        room, source = self.room(row)
        if room < 1:
            raise _no_room_rendered(source)
        return row

    async def drift(
        self, transcript: Transcript, messages: Sequence[Message], said: Mapping[int, str]
    ) -> Drift:
        """See `ChatTemplate.drift`; beside the loop, since it renders a whole conversation."""
        return await self._services.texts.run(
            True,
            self._services.template.drift,
            *(transcript, messages, said, self._schemas),
        )

    def room(self, transcript: Transcript) -> tuple[int, str]:
        """Tokens that may still be appended, and the path of the length that bounds them."""
        context_length = self._services.engines.info.context_length
        lengths = self._services.config.lengths
        return remaining(transcript, lengths, context_length, self.kept_tokens)

    @property
    def template(self) -> ChatTemplate:
        """The model's tokenizer and chat format."""
        return self._services.template

    @property
    def turn_room(self) -> int | None:
        """Tokens of a turn; None: as many as there is room for."""
        return self._services.config.lengths.turn

    @property
    def prompt_room(self) -> int:
        """Tokens of a row that may stand as its prompt."""
        context_length = self._services.engines.info.context_length
        return longest_prompt(self._services.config.lengths, context_length)

    @property
    def _schemas(self) -> Schemas | None:
        return self.reader.schemas or None

    def _prompt(self, messages: Given, longest: int | None) -> Worded:
        template, own = self._services.template, order_messages(as_messages(messages))
        ids = template.prompt_ids(own, self._schemas, max_tokens=longest)
        media = template.places_of(ids, list(find_shown(own)))
        return Worded(ids, own, template.opens_reasoning, media=media)

    def _observation(
        self,
        messages: Given,
        room: tuple[int, str],
        after: Sequence[int] | None,
        before: Sequence[Media] = (),
    ) -> Worded:
        template, own = self._services.template, as_messages(messages)
        try:
            ids, opens = template.observe(own, after=after, max_tokens=room[0] - 1, before=before)
        except TooManyTokens as error:
            raise no_room(room[1], f"at least {error.least}") from None
        if len(ids) >= room[0]:
            raise no_room(room[1], str(len(ids)))
        media = template.places_of(ids, list(find_shown(own)))
        return Worded(ids, own, opens, found=find_texts(own, template.decode(ids)), media=media)


def no_room(source: str, count: str) -> LimitExceeded:
    """What an observation of so many tokens, which does not fit, ends its trajectory with."""
    return length_error(source, f"an observation of {count} tokens does not fit")


def _no_room_rendered(source: str) -> LimitExceeded:
    return length_error(source, "the conversation rendered again leaves no room for a token")
