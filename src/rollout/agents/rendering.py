"""Renders a trajectory's messages and encodes them, and says whether there is room for them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from rollout.agents.ending import RejectedPrompt
from rollout.agents.history import Rendered
from rollout.agents.long_texts import is_long, room_beside, run_text
from rollout.agents.media_intake import may_show
from rollout.agents.turn import TurnReader
from rollout.chat.encoding import TooManyTokens
from rollout.chat.messages import as_messages
from rollout.chat.reasoning import opens_reasoning
from rollout.chat.result_order import message_ids, order_messages
from rollout.engine.cores.checks import describe_outside_id
from rollout.errors import AgentError, LimitExceeded, MediaError, TemplateError
from rollout.media.records import find_shown
from rollout.types import Message, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.agents.history import History
    from rollout.agents.services import Services
    from rollout.chat.drift import Drift
    from rollout.chat.transcript import Transcript
    from rollout.media import Media

#: Messages as agents give them.
Given = Sequence[Message | Mapping[str, Any]]
#: What the model reads and did not write: messages, or tokens.
Observation: TypeAlias = "Given | array[int]"
#: Of tools, as OpenAI has them.
Schemas = Sequence[Mapping[str, Any]]
#: Tokens that may still be appended, and the path of the length that bounds them.
Room = tuple[int, str]
NO_ROOM_AGAIN = "the conversation rendered again leaves no room for a token"


class Renderer:
    """Renders and encodes where certain tools are offered; long texts beside the event loop.

    Attributes:
        reader: Decodes and parses turns of the model where these tools are offered.
    """

    def __init__(self, services: Services, schemas: Schemas) -> None:
        self._services = services
        self.reader = TurnReader(services.template, services.parser, schemas)
        self._short = room_beside(schemas)
        self._lengths = services.config.lengths
        self._context_length = services.engines.info.context_length

    @property
    def prompt_room(self) -> int:
        """Most tokens of a prompt that can be answered."""
        return min(self._lengths.prompt, self._context_length - 1)

    async def render_prompt(
        self, messages: Given, *, longest: int | None = None, is_shared: bool = False
    ) -> Rendered:
        """Render a prompt.

        Args:
            messages: At least one.
            longest: Most tokens; None: as `lengths` has it, with what becomes of longer ones.
            is_shared: Other trajectories begin with the same list.

        Raises:
            RejectedPrompt: They cannot be rendered, or are more than fits.
        """
        is_cut = longest is None and self._lengths.overlong_prompts == "cut"
        longest = self.prompt_room if longest is None else longest
        try:
            shown = await self._services.media.prepare(messages, is_shared=is_shared)
            is_much = is_long(shown, self._short)
            most = None if is_cut else longest
            rendered = await self._run(is_much, shown, self._render_prompt, shown, most)
        except TooManyTokens as error:
            raise self._reject_length(f"at least {error.least}") from None
        except TemplateError as error:
            raise RejectedPrompt("bad_message", str(error)) from error
        cut = len(rendered.ids) - longest
        if cut <= 0:
            return rendered
        if not is_cut or rendered.media:  # a picture cannot be cut in two
            raise self._reject_length(str(len(rendered.ids)))
        return rendered._replace(ids=rendered.ids[cut:], is_raw=True, cut_tokens=cut)

    async def render_opening(self, what: str, messages: Given) -> Rendered:
        """Render what a conversation begins with that is not the trajectory's prompt.

        Where the model has spoken in them, the messages may take the room of its answers too.

        Args:
            what: What is done with them, for messages.

        Raises:
            LimitExceeded: They are more than fits.
            AgentError: They cannot be rendered.
        """
        is_list = isinstance(messages, Sequence)  # what is none is refused with the words for it
        is_continued = is_list and any(message_ids(each).role == "assistant" for each in messages)
        longest = self._find_longest()[0] - 1 if is_continued else self.prompt_room
        try:
            return await self.render_prompt(messages, longest=longest)
        except RejectedPrompt as error:
            if error.reason == "bad_message":
                raise AgentError(f"{what}: {error}") from error
            source = {"prompt_length": "lengths.prompt"}.get(error.reason, "engine.context_length")
            raise make_length_error(source, str(error)) from error

    def read_opening(
        self, what: str, ids: Sequence[int], messages: Given | None = None
    ) -> Rendered:
        """Take what a conversation begins with, put into tokens by its agent.

        Args:
            what: The function that got them, for messages.
            ids: At least one.
            messages: Of a prompt: those that it stands for; those that cannot be read are dropped.

        Raises:
            AgentError: They are no ids, or none.
            RejectedPrompt: It is more than fits into a prompt.
            LimitExceeded: It is no prompt, and more than fits.
        """
        packed = self.pack_ids(what, ids)
        if not packed:
            raise AgentError(f"{what}: no ids; expected those of a prompt")
        if messages is not None and len(packed) > self.prompt_room:
            raise self._reject_length(str(len(packed)))
        rendered = self._take_ids(packed, self._find_longest())
        with suppress(TemplateError, MediaError):
            rendered = rendered._replace(messages=as_messages(messages) if messages else [])
        return rendered

    def is_slow(self, observation: Observation) -> bool:
        """Whether it is rendered beside the event loop, since it is long or shows something."""
        if isinstance(observation, array):
            return False
        is_shown = may_show(observation) and self._services.template.processor is not None
        return is_shown or is_long(observation)

    def render_now(
        self,
        observation: Observation,
        after: Sequence[int] | None,
        room: Room,
        before: Sequence[Media] = (),
    ) -> Rendered:
        """Render an observation.

        Args:
            observation: Of messages without unread images and videos.
            after, before: As in `ChatTemplate.observe`.
            room: What there is for it.

        Raises:
            LimitExceeded: It would leave no room for one more token.
            TemplateError: Messages are malformed, or the template refuses them.
        """
        if isinstance(observation, array):
            return self._take_ids(observation, room)
        template, own = self._services.template, as_messages(observation)
        try:
            ids, opens = template.observe(own, after=after, max_tokens=room[0] - 1, before=before)
        except TooManyTokens as error:
            raise _make_room_error(room, f"at least {error.least}") from None
        if len(ids) >= room[0]:
            raise _make_room_error(room, str(len(ids)))
        media = template.places_of(ids, list(find_shown(own)))
        return Rendered(ids, own, opens, media=media)

    async def render_observation(
        self,
        observation: Observation,
        after: Sequence[int] | None,
        room: Room,
        transcript: Transcript,
    ) -> Rendered:
        """As `render_now`, where it belongs, with its images and videos read."""
        before = [each.medium for each in transcript.media]
        if not isinstance(observation, array):
            observation = await self._services.media.prepare(observation, len(before))
        args = observation, after, room, before
        return await self._run(is_long(observation), observation, self.render_now, *args)

    def pack_ids(self, what: str, ids: Any) -> array[int]:
        """Pack token ids.

        Args:
            what: The function that got them, for messages.

        Raises:
            AgentError: They are no sequence of integers, or outside the vocabulary.
        """
        try:
            packed = array("i", ids)
        except (TypeError, ValueError, OverflowError) as error:
            raise AgentError(f"{what}: {error}; expected a sequence of token ids") from error
        fault = describe_outside_id(packed.tobytes(), self._services.engines.info.vocab_size)
        if fault:
            raise AgentError(f"{what}: {fault}")
        return packed

    def _take_ids(self, ids: array[int], room: Room) -> Rendered:
        """Tokens as they are, which no message stands for."""
        if len(ids) >= room[0]:
            raise _make_room_error(room, str(len(ids)))
        is_opening = opens_reasoning(self._services.template.decode(ids))
        return Rendered(ids, [], is_opening, is_raw=True)

    def _find_longest(self) -> Room:
        """Tokens of a whole conversation, and the path of the length that bounds them."""
        both = self._lengths.prompt + self._lengths.response
        if both < self._context_length:
            return both, "lengths.response"
        return self._context_length, "engine.context_length"

    async def render_again(self, history: History) -> Transcript:
        """Render a conversation again from its start, as a serving stack gets it.

        Raises:
            TemplateError: The template refuses the conversation.
            LimitExceeded: It is more than fits.
        """
        most, source = self._find_longest()
        is_much = is_long(history.messages, self._short)
        try:
            ids = await run_text(self._services.texts, is_much, self._encode_again, history, most)
        except TooManyTokens:
            raise make_length_error(source, NO_ROOM_AGAIN) from None
        placed = self._services.template.places_of(ids, list(find_shown(history.messages)))
        return history.split_again(ids, placed, self._lengths.prompt)

    def _encode_again(self, history: History, most: int) -> array[int]:
        """The ids of all messages; calls and their answers in plain words where they must be.

        Some templates refuse two calls in a turn, or an answer that no call precedes: what a model
        can write must not fail its trajectory.
        """
        encode = partial(self._services.template.prompt_ids, tools=self._schemas, max_tokens=most)
        try:
            return encode(history.serve_messages(in_words=False))
        except TooManyTokens:
            raise
        except TemplateError:
            return encode(history.serve_messages(in_words=True))

    async def find_drift(self, history: History) -> Drift:
        """See `ChatTemplate.drift`; beside the loop, since it renders the conversation again."""
        args = history.transcript, history.messages, history.decode_turns(), self._schemas
        return await run_text(self._services.texts, True, self._services.template.drift, *args)

    @property
    def _schemas(self) -> Schemas | None:
        return self.reader.schemas or None

    async def _run(
        self, is_much: bool, messages: Observation, render: Callable[..., Rendered], *args: Any
    ) -> Rendered:
        """Render where it belongs: what a processor makes tokens of, in the threads of media."""
        if not may_show(messages):
            return await run_text(self._services.texts, is_much, render, *args)
        rendered: Rendered = await self._services.media.run(render, *args)
        return rendered

    def _render_prompt(self, messages: Given, longest: int | None) -> Rendered:
        template, own = self._services.template, order_messages(as_messages(messages))
        ids = template.prompt_ids(own, self._schemas, max_tokens=longest)
        media = template.places_of(ids, list(find_shown(own)))
        return Rendered(ids, own, template.ends_in_reasoning(ids), media=media)

    def _reject_length(self, count: str) -> RejectedPrompt:
        """The error of a prompt of so many tokens."""
        text = f"the prompt has {count} tokens; "
        if self._lengths.prompt < self._context_length:
            text += f"lengths.prompt = {self._lengths.prompt}"
            return RejectedPrompt("prompt_length", text)
        text += f"the engine's context of {self._context_length} leaves no room"
        return RejectedPrompt("context_length", text)


def make_length_error(source: str, what: str) -> LimitExceeded:
    """The error that ends a trajectory where the length at `source` leaves no room."""
    text, reason = f"{source}: {what}", source.rpartition(".")[2]
    return LimitExceeded(text, source=source, reason=reason, outcome=Outcome.LENGTH)


def _make_room_error(room: Room, count: str) -> LimitExceeded:
    """The error of an observation of so many tokens, which does not fit."""
    return make_length_error(room[1], f"an observation of {count} tokens does not fit")
