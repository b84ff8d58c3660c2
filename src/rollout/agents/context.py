"""What an agent loop may do: have the model generate, call tools, ask the user."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from rollout.agents.conversation import Conversation
from rollout.agents.conversation_log import ConversationLog
from rollout.agents.identity import Ending, Identity
from rollout.agents.interacting import (
    USER,
    finish,
    heard,
    interaction_context,
    interaction_name,
    new_interaction,
)
from rollout.agents.places import Row
from rollout.agents.segment_opening import open_segment
from rollout.agents.trajectory_state import OfMain, SettlingLimits, Shared, TrajectoryState
from rollout.agents.turn_events import tell_user_ended
from rollout.chat.drift import worst
from rollout.chat.messages import template_messages
from rollout.chat.trajectory import BRANCH, MAIN, SUBAGENT
from rollout.chat.transcript import Transcript
from rollout.containment import contain
from rollout.errors import AgentError
from rollout.types import without_padding

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from rollout.agents.gateway_door import GatewayDoor
    from rollout.agents.services import Services
    from rollout.agents.turn import AssistantTurn, SampledTokens
    from rollout.agents.turn_log import TurnLog
    from rollout.agents.wording import Given, Schemas
    from rollout.chat.drift import Drift
    from rollout.config import AgentConfig
    from rollout.engine.core import SamplingParams
    from rollout.engine.pool.generation import Generation
    from rollout.interactions import Interaction, InteractionTurn
    from rollout.limits import Clock, Deadline
    from rollout.observe.event_stream import EventStream
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.tools import ToolResult, TrajectoryTools
    from rollout.types import InvalidToolCall, Message, Outcome, Prompt, ToolCall

_INNER = (
    "_interaction",
    "_interaction_name",
    "_is_whole",
    "_main",
    "_state",
    "pinned_calls",
)


class AgentContext:
    """One trajectory from the inside.

    Attributes:
        on_tokens: Called with the `Generation` under way at each of its chunks.
        extra: Becomes the trajectory's `extra`; tools, users and rewards see it too.
        turn_scores: What the simulated user gave.
        tool_rewards: What the tools gave.
        ending: The outcome, where it is settled already.
        generations: Turns of the model, over all conversations, with those under way;
            `agent.max_assistant_turns` bounds them.
        generation_s: Seconds spent waiting for engines, queueing included, over all conversations.
        resumes: How often a generation continued elsewhere because its replica was lost.
        restarts: Why generations began again then, each time one did.
        discarded_tokens: Tokens that were dropped by that.
        cut_prompt_tokens: Tokens that the prompt has lost, to fit; see `lengths.overlong_prompts`.
        sampled_placeholders: Turns that ended before a placeholder of an image or a video, which
            the model had sampled by itself.
        pinned_calls: Calls of clients whose sampling `gateway.sampling` "pin" has overridden.
        truncated_tokens: Sampled tokens of training rows that top_k, top_p or min_p were set for.
    """

    # What an agent keeps on it is its own, and so is what it does to `__dict__`.
    __slots__ = ("__dict__", "__weakref__", *_INNER)

    on_tokens: OfMain[list[Callable[[Generation], object]]] = OfMain()
    extra = Shared[dict[str, Any]]()
    turn_scores = Shared[list[float]]()
    tool_rewards = Shared[list[float]]()
    ending = Shared[Ending | None]()
    generations = Shared[int]()
    generation_s = Shared[float]()
    cached_tokens = Shared[int]()
    resumes = Shared[int]()
    restarts = Shared[list[str]]()
    discarded_tokens = Shared[int]()
    cut_prompt_tokens = Shared[int]()
    sampled_placeholders = Shared[int]()
    truncated_tokens = Shared[int]()

    def __init__(
        self,
        services: Services,
        prompt: Prompt,
        identity: Identity,
        sampling: SamplingParams,
        limit: Clock,
        log: TurnLog | None = None,
        is_alone: bool = False,
    ) -> None:
        self._state = TrajectoryState(services, prompt, identity, limit, log)
        self._main = Conversation(
            self._state,
            ConversationLog.of(Row(Transcript(), MAIN), self._state.wording.reader),
            sampling,
            identity,
            self._state.wording,
            group_id="" if is_alone else f"{identity.step}/{identity.uid}",
        )
        self._interaction: Interaction | None = None
        self._interaction_name = interaction_name(prompt, self.config)
        self._is_whole = True
        self.pinned_calls = 0

    def beside(self, conversation: Conversation) -> AgentContext:
        """The same trajectory, seen from another of its conversations, in the place of `main`."""
        other = copy.copy(self)
        other._main, other._interaction, other._is_whole = conversation, None, False
        return other

    @property
    def services(self) -> Services:
        """What all trajectories of the runtime share."""
        return self._state.services

    @property
    def config(self) -> AgentConfig:
        """The `agent` section of the configuration."""
        return self._state.config

    @property
    def prompt(self) -> Prompt:
        """What it started from."""
        return self._state.prompt

    @property
    def identity(self) -> Identity:
        """Which trajectory it is."""
        return self._state.identity

    @property
    def deadline(self) -> Deadline:
        """When the trajectory's time is over, as things stand, and which limit ends it then."""
        return self._state.limit.deadline

    @property
    def idle_since(self) -> float:
        """When the last generation, call or answer of a user ended, on the loop's clock."""
        tools = self._state.tools_asked_for
        return max(self._state.idle_since, 0.0 if tools is None else tools.idle_since)

    @property
    def calls_under_way(self) -> Sequence[tuple[str, float]]:
        """Calls of tools that run: name, and since when."""
        tools = self._state.tools_asked_for
        return () if tools is None else tools.under_way

    @property
    def tools(self) -> TrajectoryTools:
        """The tools offered to the model; `schemas` lists them."""
        return self._state.tools

    @property
    def tools_asked_for(self) -> TrajectoryTools | None:
        """The same; None where nobody has asked for them yet."""
        return self._state.tools_asked_for

    @property
    def sandbox(self) -> TrajectorySandbox:
        """The trajectory's sandbox, which its tools and its reward see too.

        It is opened when it is first used, and closed after the reward. That it is lost, or cannot
        be opened, ends the trajectory as failed.
        """
        return self._state.sandbox

    @property
    def sandbox_asked_for(self) -> TrajectorySandbox | None:
        """The same; None where nobody has asked for it yet."""
        return self._state.sandbox_asked_for

    @property
    def door(self) -> GatewayDoor:
        """The gateway, for agents that speak HTTP.

        Raises:
            AgentError: There is none.
        """
        return self.services.gateway.open_door()

    @property
    def main(self) -> Conversation:
        """The conversation that begins with the prompt; `branch` and `subagent` open others.

        What the context says of a conversation is this one's.
        """
        return self._main

    @property
    def transcript(self) -> Transcript:
        """The exact tokens so far."""
        return self._main.transcript

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far, decoded as it is read."""
        return self._main.messages

    @property
    def assistant_turns(self) -> int:
        """Generations so far."""
        return self._main.assistant_turns

    @property
    def user_turns(self) -> int:
        """Answers of tools or users so far."""
        return self._main.user_turns

    @property
    def cut_by(self) -> str | None:
        """As `AssistantTurn.cut_by`, of the last generation."""
        return self._main.cut_by

    @property
    def sampling(self) -> SamplingParams:
        """How the next generation is sampled; assign `SamplingParams` or a mapping to change it.

        A mapping gives fields as a prompt's `sampling` does: what it leaves out is what the prompt
        and the configuration say. `generate` takes fields for one turn.

        Raises:
            AgentError: What is assigned has a name that is no field, or a value that cannot be.
        """
        return self._main.sampling

    @sampling.setter
    def sampling(self, sampling: SamplingParams | Mapping[str, Any]) -> None:
        self._main.sampling = sampling

    @property
    def reward(self) -> Any:
        """What the agent itself gives; assign to set it. Of a segment's context, the segment's.

        A number, a `Reward` (not of a segment) or None; a reward function of `open_rollout` decides
        in its place.
        """
        return self._state.reward if self._is_whole else self._main.reward

    @reward.setter
    def reward(self, reward: Any) -> None:
        own: TrajectoryState | Conversation = self._state if self._is_whole else self._main
        own.reward = reward

    @property
    def has_interaction(self) -> bool:
        """Whether a simulated user takes part."""
        return self._is_whole and self._interaction_name is not None

    @property
    def events(self) -> EventStream:
        """Takes what happens to those who want to know."""
        return self.services.events

    def end(
        self, outcome: Outcome | str, reason: str = "", *, limit_source: str | None = None
    ) -> None:
        """Settle the outcome; return from `run` afterwards. The first call counts.

        Raises:
            AgentError: An argument is of another kind; nothing is settled.
        """
        self._state.end(outcome, reason, limit_source=limit_source)

    async def open_first(self) -> None:
        """Open the tools that are open before the agent begins; the prompt goes on with what they
        observe.

        Raises:
            ToolError: One could not be opened.
        """
        observations = await self.tools.open_first()
        if observations:
            self._state.continue_prompt(observations)

    async def begin(
        self, messages: Given | None = None, *, ids: Sequence[int] | None = None
    ) -> None:
        """Render the prompt and start the simulated user; `generate` does so where nobody has.

        Args:
            messages: In place of the prompt's own, or of those that a segment was opened with.
            ids: The prompt in tokens. Neither it nor the history is rendered then, or compared.
        """
        if self.transcript and ids is None and not self._is_whole:
            if messages is not None:  # a segment begins as it is opened
                await self._main.begin_with(without_padding(messages))
            return
        if self.transcript:
            raise AgentError("begin: the trajectory has begun already")
        given = self._state.given.messages if messages is None else without_padding(messages)
        wording = self._state.wording
        if ids is None:
            worded = await wording.prompt(given, is_shared=messages is None)
        else:
            worded = wording.raw_prompt(ids, given)
        if worded.cut_tokens:
            self._state.note_cut(worded.cut_tokens)
        self._interaction = new_interaction(self.services, self._interaction_name)
        self._main.begin(worded)
        if self._interaction is not None:
            await self._interaction.start(interaction_context(self))

    def generate(self, **sampling: Any) -> Coroutine[Any, Any, AssistantTurn]:
        """As `Conversation.generate`, awaited; begins the trajectory where nobody has.

        Args:
            sampling: Fields of `sampling` that differ in this turn, such as ``temperature=0.2``.
        """
        if self.transcript:
            return self._main.generate(**sampling)
        return self._begin_and_generate(sampling)

    async def _begin_and_generate(self, sampling: Mapping[str, Any]) -> AssistantTurn:
        await self.begin()
        return await self._main.generate(**sampling)

    async def generate_ids(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any] | SamplingParams | None = None,
    ) -> SampledTokens:
        """As `Conversation.generate_ids`; where nobody has begun, the ids are the prompt."""
        if not self.transcript:
            await self.begin(ids=prompt_ids)
        return await self._main.generate_ids(prompt_ids, sampling)

    async def call_tools(
        self, calls: Sequence[ToolCall | InvalidToolCall | Mapping[str, Any]]
    ) -> list[ToolResult]:
        """As `Conversation.call_tools`: calls of a turn, or dicts of their names and arguments."""
        return await self._main.call_tools(calls)

    async def ask_user(self) -> InteractionTurn:
        """Let the simulated user answer; its words are appended unless it is done.

        Raises:
            LimitExceeded: A deadline fired, or its words leave no room for another token.
        """
        turn, words = await self.hear_user()
        if words:
            await self._main.answer(words)
        return turn

    async def hear_user(self) -> tuple[InteractionTurn, list[Message]]:
        """The simulated user's turn, and the messages that say it; nothing is appended.

        Raises:
            LimitExceeded: A deadline fired.
        """
        if self._interaction is None:
            raise AgentError("ask_user: no interaction takes part in this trajectory")
        await self.settle()
        events, began = self.services.events, self._state.clock()
        with (
            SettlingLimits(self._state, settles_lengths=True),
            self._main.answering(),
        ):
            respond, messages = self._interaction.respond, list(template_messages(self.messages))
            turn = await contain(USER, partial(respond, messages))
        self._state.idle_since = now = self._state.clock()
        if events.is_on:
            tell_user_ended(events, self.identity, began, now)
        return turn, heard(self, self._interaction_name, turn)

    def observe(self, messages: Given) -> None:
        """As `Conversation.observe`."""
        self._main.observe(messages)

    def observe_ids(self, ids: Sequence[int]) -> None:
        """As `Conversation.observe_ids`."""
        self._main.observe_ids(ids)

    async def settle(self) -> None:
        """As `Conversation.settle`."""
        await self._main.settle()

    async def branch(self, position: int | None = None, *, purpose: str = BRANCH) -> Conversation:
        """As `Conversation.branch`; begins the trajectory where nobody has."""
        if not self.transcript:
            await self.begin()
        return await self._main.branch(position, purpose=purpose)

    async def subagent(
        self, messages: Given, *, purpose: str = SUBAGENT, tools: Schemas | None = None
    ) -> Conversation:
        """As `Conversation.subagent`; null keys are dropped as from a prompt's messages."""
        return await self._main.subagent(without_padding(messages), purpose=purpose, tools=tools)

    def open_segment(
        self,
        messages: Given,
        purpose: str = SUBAGENT,
        tools: Sequence[str | Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | SamplingParams | None = None,
    ) -> AbstractAsyncContextManager[AgentContext]:
        """A conversation of its own for the block, as a context that an agent loop could run on.

        Several may be open at once, each used by one task; the trajectory's limits hold for all.
        Leaving the block closes it; what was said stays, as a segment.

        Args:
            messages: With which it begins; null keys are dropped as from a prompt's.
            purpose: Of its segment.
            tools: Names of its tools, or schemas of some that the agent answers; None: as this one.
            sampling: Fields of `sampling` that differ there, or all of it; None: as this one.

        Raises:
            LimitExceeded: The messages are more than fits.
            AgentError: They cannot be rendered, or an argument is wrong.
        """
        return open_segment(self, without_padding(messages), purpose, tools, sampling)

    async def compact(self, messages: Given) -> None:
        """As `Conversation.compact`; null keys are dropped as from a prompt's messages."""
        await self._main.compact(without_padding(messages))

    async def check_tokens(self) -> Drift | None:
        """How transcripts differ from their conversations rendered again: the worst difference.

        None where nothing was compared.

        Raises:
            TemplateError: The template refuses a conversation.
        """
        drifts = [await each.check_tokens() for each in self._main.all()]
        return worst(drift for drift in drifts if drift is not None)

    async def score(self) -> None:
        """Ask the tools for their final rewards, once all is said; not where nothing was generated.

        Raises:
            LimitExceeded: As `settle`.
        """
        for each in (conversations := list(self._main.all())):
            await each.settle()
        if any(row.transcript.generated_length for each in conversations for row in each.rows):
            tools = self._state.tools_asked_for
            if tools is not None:
                self.tool_rewards.extend(await tools.calc_rewards())
                if self.reward is None:
                    self.reward = tools.reward

    async def close(self) -> None:
        """End the tools and the simulated user; shielded, bounded, never raises."""
        for each in self._main.all():
            self.services.engines.forget(each.session_id)
        self._state.is_over = True
        tools, interaction = self._state.tools_asked_for, self._interaction
        if tools is None and interaction is None:
            return
        with anyio.CancelScope(shield=True):
            if tools is not None:
                await tools.close()
            self._interaction = None
            if interaction is not None:
                cleanup_s = self.services.config.limits.cleanup_s
                await finish(interaction, self.identity.session_id, cleanup_s)
