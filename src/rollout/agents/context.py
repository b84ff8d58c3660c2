"""What an agent loop may do: have the model generate, call tools, ask the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from rollout.agents.conversation import Conversation
from rollout.agents.history import History, open_row
from rollout.agents.segments import Row, check_purpose
from rollout.agents.simulated_user import (
    USER,
    close_user,
    emit_user_ended,
    make_user,
    read_user_turn,
    start_user,
)
from rollout.agents.trajectory_state import TrajectoryState
from rollout.agents.turn_options import DEFAULT_OPTIONS, TurnOptions
from rollout.chat.drift import worst
from rollout.chat.messages import template_messages
from rollout.chat.reward_values import BadRewardError, as_reward
from rollout.chat.trajectory import BRANCH, MAIN, SUBAGENT
from rollout.chat.transcript import Transcript
from rollout.containment import contain
from rollout.errors import AgentError
from rollout.types import without_padding

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from typing import Self

    from rollout.agents.gateway_door import GatewayDoor
    from rollout.agents.identity import Ending, Identity
    from rollout.agents.rendering import Given, Rendered, Renderer, Schemas
    from rollout.agents.services import Services
    from rollout.agents.turn import AssistantTurn, SampledTokens
    from rollout.agents.turn_log import TurnLog
    from rollout.chat.drift import Drift
    from rollout.config import AgentConfig
    from rollout.engine.core import SamplingParams
    from rollout.interactions import InteractionTurn
    from rollout.limits import Clock, Deadline
    from rollout.observe.event_stream import EventStream
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.tools import TrajectoryTools
    from rollout.types import Message, Outcome, Prompt


class AgentContext(Conversation):
    """One trajectory from the inside: its main conversation, or one opened from that.

    The main conversation begins with the prompt. `open_segment`, `branch` and `subagent` open
    others, each a context of the same trajectory. What an agent keeps on a context is its own.

    Attributes:
        on_tokens: Called with the `Generation` under way at each of its chunks.
        pinned_calls: Calls of clients whose sampling `gateway.sampling` "pin" has overridden.
    """

    def __init__(
        self,
        state: TrajectoryState,
        log: History,
        identity: Identity,
        renderer: Renderer,
        sampling: SamplingParams,
        *,
        group_id: str = "",
    ) -> None:
        super().__init__(state, log, identity, renderer, sampling, group_id=group_id)
        self._opened: tuple[Self, ...] = ()
        self._opened_count = 0
        self.pinned_calls = 0

    # The trajectory.

    @property
    def is_main(self) -> bool:
        """Whether it is the trajectory's main conversation."""
        return not self._identity.path

    @property
    def main(self) -> Self:
        """Itself."""
        return self

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
        tools = self._state.used_tools
        return max(self._state.idle_since, 0.0 if tools is None else tools.idle_since)

    @property
    def calls_under_way(self) -> Sequence[tuple[str, float]]:
        """Calls of tools that run: name, and since when."""
        tools = self._state.used_tools
        return () if tools is None else tools.under_way

    @property
    def tools(self) -> TrajectoryTools:
        """The tools offered to the model; `schemas` lists them."""
        return self._state.tools

    @property
    def used_tools(self) -> TrajectoryTools | None:
        """The same; None where nobody has asked for them yet."""
        return self._state.used_tools

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
        return self._state.used_sandbox

    @property
    def door(self) -> GatewayDoor:
        """The gateway, for agents that speak HTTP.

        Raises:
            AgentError: There is none.
        """
        return self.services.gateway.open_door()

    @property
    def has_interaction(self) -> bool:
        """Whether a simulated user takes part."""
        return self.is_main and self._state.user_name is not None

    @property
    def events(self) -> EventStream:
        """Takes what happens to those who want to know."""
        return self.services.events

    @property
    def extra(self) -> dict[str, Any]:
        """Becomes the trajectory's `extra`; tools, users and rewards see it too."""
        return self._state.extra

    @property
    def turn_scores(self) -> list[float]:
        """What the simulated user gave."""
        return self._state.turn_scores

    @property
    def tool_rewards(self) -> list[float]:
        """What the tools gave."""
        return self._state.tool_rewards

    @property
    def ending(self) -> Ending | None:
        """The outcome, where it is settled already."""
        return self._state.ending

    @property
    def generations(self) -> int:
        """Turns of the model, over all conversations, with those under way."""
        return self._state.generations

    @property
    def generation_s(self) -> float:
        """Seconds spent waiting for engines, queueing included."""
        return self._state.generation_s

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that engines had in their cache."""
        return self._state.cached_tokens

    @property
    def resumes(self) -> int:
        """How often a generation continued elsewhere because its replica was lost."""
        return self._state.resumes

    @property
    def restarts(self) -> list[str]:
        """Why generations began again then, each time one did."""
        return self._state.restarts

    @property
    def discarded_tokens(self) -> int:
        """Tokens that were dropped by that."""
        return self._state.discarded_tokens

    @property
    def cut_prompt_tokens(self) -> int:
        """Tokens that the prompt has lost, to fit; see `lengths.overlong_prompts`."""
        return self._state.cut_prompt_tokens

    @property
    def sampled_placeholders(self) -> int:
        """Turns that ended before a placeholder of an image or a video that was sampled."""
        return self._state.sampled_placeholders

    @property
    def truncated_tokens(self) -> int:
        """Sampled tokens of training rows that top_k, top_p or min_p were set for."""
        return self._state.truncated_tokens

    @property
    def reward(self) -> Any:
        """What the agent itself gives; assign to set it. Of an opened conversation, its segment's.

        A number, a `Reward` (not of a segment) or None; a reward function of `open_rollout` decides
        in its place.

        Raises:
            AgentError: What is assigned is none of these.
        """
        return self._state.reward if self.is_main else self._reward

    @reward.setter
    def reward(self, reward: Any) -> None:
        if not self.is_main:
            return self._set_reward(reward)
        try:
            as_reward(0.0 if reward is None else reward, "the agent")
        except BadRewardError as error:
            raise AgentError(f"{self.identity}: reward = {reward!r:.80}: {error}") from None
        self._state.reward = reward
        return None

    def end(
        self, outcome: Outcome | str, reason: str = "", *, limit_source: str | None = None
    ) -> None:
        """Settle the outcome; return from `run` afterwards. The first call counts.

        Raises:
            AgentError: An argument is of another kind; nothing is settled.
        """
        self._state.end(outcome, reason, limit_source=limit_source)

    # How it begins.

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
        if self.transcript and ids is None and not self.is_main:
            if messages is not None:  # a segment begins as it is opened
                await self.begin_with(without_padding(messages))
            return
        if self.transcript:
            raise AgentError("begin: the trajectory has begun already")
        state, is_shared = self._state, messages is None
        given = state.original_prompt.messages if messages is None else without_padding(messages)
        if ids is None:
            rendered = await state.renderer.render_prompt(given, is_shared=is_shared)
        else:
            rendered = state.renderer.read_prompt(ids, given)
        if rendered.cut_tokens:
            state.count_cut(rendered.cut_tokens)
        state.interaction = make_user(state.services, state.user_name)
        self._log.begin(rendered)
        if state.interaction is not None:
            await start_user(state.interaction, self)

    async def begin_with(self, messages: Given, *, tools: Schemas | None = None) -> None:
        """Begin with these messages in place of the prompt's, or of those that it was opened with.

        A length that the conversation runs into from now on is its agent's to judge, and ends
        nothing by itself.

        Args:
            messages: At least one.
            tools: Schemas offered in place of the trajectory's tools; None: those, or what it was
                opened with.

        Raises:
            LimitExceeded: They are more than fits; nothing has begun.
            AgentError: They cannot be rendered, or it has begun.
        """
        is_main, row = self.purpose == MAIN, self.rows[0]
        renderer = self._renderer
        if is_main or tools is not None:
            renderer = self._state.make_renderer(tools)
        rendered = await renderer.render_opening("begin_with", messages)
        if self.transcript and (is_main or row.seeds):
            raise AgentError(f"begin_with: {self.session_id} has begun already")
        if row.parent is not None:
            row = open_row(row.parent, rendered.ids, row.purpose)
        self._renderer, self._log = renderer, History(row, renderer.reader)
        self._log.begin(rendered, renderer.prompt_room)
        self._ends_at_lengths = False

    async def generate(
        self, options: TurnOptions = DEFAULT_OPTIONS, **sampling: Any
    ) -> AssistantTurn:
        """As `Conversation.generate`; begins the trajectory where nobody has."""
        if not self.transcript:
            await self.begin()
        return await super().generate(options, **sampling)

    async def generate_ids(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any] | SamplingParams | None = None,
    ) -> SampledTokens:
        """As `Conversation.generate_ids`; where nobody has begun, the ids are the prompt."""
        if not self.transcript:
            await self.begin(ids=prompt_ids)
        return await super().generate_ids(prompt_ids, sampling)

    # Conversations that are opened from it.

    @property
    def opened(self) -> Sequence[Self]:
        """The conversations opened from it, in their order."""
        return self._opened

    def all(self) -> Iterator[Self]:
        """It and those opened from it, each before its own, in the order of their opening."""
        yield self
        for each in self._opened:
            yield from each.all()

    async def branch(
        self,
        position: int | None = None,
        *,
        purpose: str = BRANCH,
        messages: Given | None = None,
        is_ordered: bool = False,
    ) -> Self:
        """A conversation that continues this one differently, from its end or an earlier position.

        It begins the trajectory where nobody has.
        Its transcript begins with this one's first tokens, which are context there: mask 0.

        Args:
            position: How many tokens; None: all there are. The end of a prompt, of a turn or of
                what answered it, or within a turn, which the branch then continues.
            purpose: Of its segment.
            messages: What the model is told there first, as by `answer`.
            is_ordered: As for `answer`.

        Raises:
            AgentError: It cannot be continued there.
            LimitExceeded: The messages leave no room for one more token; nothing is opened.
            TemplateError: As `answer`; nothing is opened.
        """
        check_purpose(purpose)
        if not self.transcript:
            await self.begin()
        identity = self._next_identity()
        if self._generation is None:
            self._check_idle("branch")
            await self._settle()
        position = len(self.transcript) if position is None else position
        log = self._log.fork(position, purpose, self._renderer.reader)
        opened = self._make(log, identity, self._renderer, self._group_id or self._session_id)
        if messages is not None:
            await opened.answer(messages, is_ordered=is_ordered)
        self._opened += (opened,)
        return opened

    async def subagent(
        self, messages: Given, *, purpose: str = SUBAGENT, tools: Schemas | None = None
    ) -> Self:
        """A conversation of its own, which begins with these messages.

        Where the model has spoken in them, they may be longer than a prompt. A "branch" or a
        "compaction" departs from this one where their tokens do, all others from its end.

        Args:
            messages: At least one; null keys are dropped as from a prompt's.
            purpose: Of its segment.
            tools: Schemas offered in place of the trajectory's tools; None: this one's.

        Raises:
            LimitExceeded: They are more than fits.
            AgentError: They cannot be rendered.
        """
        check_purpose(purpose)
        identity = self._next_identity()
        renderer = self._renderer if tools is None else self._state.make_renderer(tools)
        rendered = await renderer.render_opening("subagent", without_padding(messages))
        return self._open_beside(rendered, purpose, identity, renderer)

    def subagent_ids(self, prompt_ids: Sequence[int], *, purpose: str = SUBAGENT) -> Self:
        """As `subagent`, with tokens in place of messages; `generate_ids` continues it.

        Raises:
            LimitExceeded: They are more than fits.
            AgentError: They are no ids.
        """
        check_purpose(purpose)
        rendered = self._renderer.read_opening(prompt_ids, "subagent_ids")
        return self._open_beside(rendered, purpose, self._next_identity(), self._renderer)

    def _next_identity(self) -> Identity:
        self._opened_count += 1
        return self._identity.opened(self._opened_count - 1)

    def _open_beside(
        self, rendered: Rendered, purpose: str, identity: Identity, renderer: Renderer
    ) -> Self:
        log = History(open_row(self.rows[-1], rendered.ids, purpose), renderer.reader)
        log.begin(rendered, renderer.prompt_room)
        opened = self._make(log, identity, renderer, "")
        self._opened += (opened,)
        return opened

    def _make(self, log: History, identity: Identity, renderer: Renderer, group_id: str) -> Self:
        """Make a conversation with this one's settings."""
        kind = type(self)
        made = kind(self._state, log, identity, renderer, self._sampling, group_id=group_id)
        made.history, made._turn = self.history, self._turn
        return made

    @asynccontextmanager
    async def open_segment(
        self,
        messages: Given,
        purpose: str = SUBAGENT,
        tools: Sequence[str | Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | SamplingParams | None = None,
    ) -> AsyncIterator[Self]:
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
        offered = None if tools is None else self._list_schemas(tools)
        drawn = self.sampling
        if sampling is not None:
            drawn = self._state.read_sampling("open_segment", sampling)
        opened = await self.subagent(messages, purpose=purpose, tools=offered)
        opened.sampling = drawn
        try:
            yield opened
        finally:
            for each in opened.all():
                each._refuse_more()
                self.services.engines.forget(each.session_id)

    def _list_schemas(self, tools: Sequence[str | Mapping[str, Any]]) -> Schemas:
        """The schemas of tools that are named, or given as schemas."""
        if isinstance(tools, str) or not isinstance(tools, Sequence):
            raise AgentError(f"open_segment: tools = {tools!r:.80}; expected a list")
        own = dict(zip(self.tools.names, self.tools.schemas, strict=True))
        schemas: list[Mapping[str, Any]] = []
        for tool in tools:
            schema = own.get(tool) if isinstance(tool, str) else tool
            function = schema.get("function") if isinstance(schema, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                known = ", ".join(map(repr, own)) or "none"
                raise AgentError(
                    f"open_segment: the tool {tool!r:.80} is none of the trajectory's ({known}) "
                    "and no schema; expected a name, or "
                    "{'type': 'function', 'function': {'name': ...}}"
                )
            schemas.append(schema)  # type: ignore[arg-type]
        return schemas

    # The simulated user.

    async def ask_user(self) -> InteractionTurn:
        """Let the simulated user answer; its words are appended unless it is done.

        Raises:
            LimitExceeded: A deadline fired, or its words leave no room for another token.
        """
        turn, words = await self.hear_user()
        if words:
            await self.answer(words)
        return turn

    async def hear_user(self) -> tuple[InteractionTurn, list[Message]]:
        """The simulated user's turn, and the messages that say it; nothing is appended.

        Raises:
            LimitExceeded: A deadline fired.
        """
        state = self._state
        if state.interaction is None or not self.is_main:
            raise AgentError("ask_user: no interaction takes part in this trajectory")
        await self.settle()
        began = state.clock()
        try:
            with self.answering():
                messages = list(template_messages(self.messages))
                turn = await contain(USER, partial(state.interaction.respond, messages))
        except BaseException as error:
            state.end_by(error)
            raise
        state.idle_since = now = state.clock()
        if self.events.is_on:
            emit_user_ended(self.events, self.identity, began, now)
        return turn, read_user_turn(self, state.user_name, turn)

    # How it ends.

    async def check_tokens(self) -> Drift | None:
        """How the transcripts differ from their conversations rendered again: the worst difference.

        None where nothing was compared: where nothing was said, the history is rendered again in
        any case, or ids were observed.

        Raises:
            TemplateError: The template refuses a conversation.
        """
        return worst(
            [
                await each._renderer.find_drift(each._log)
                for each in self.all()
                if each._log.turns and each.history == "append_only" and not each._log.has_raw_ids
            ]
        )

    async def score(self) -> None:
        """Ask the tools for their final rewards, once all is said; not where nothing was generated.

        Raises:
            LimitExceeded: As `settle`.
        """
        for each in (conversations := list(self.all())):
            await each.settle()
        tools = self._state.used_tools
        if tools is not None and any(each.sampled_tokens for each in conversations):
            self.tool_rewards.extend(await tools.calc_rewards())
            if self.reward is None:
                self.reward = tools.reward

    async def close(self) -> None:
        """End the tools and the simulated user; shielded, bounded, never raises."""
        state = self._state
        for each in self.all():
            self.services.engines.forget(each.session_id)
        state.is_over = True
        tools = state.used_tools
        if tools is None and state.interaction is None:
            return
        with anyio.CancelScope(shield=True):
            if tools is not None:
                await tools.close()
            user, state.interaction = state.interaction, None
            if user is not None:
                await close_user(user, self.identity, self.services.config.limits.cleanup_s)


def open_context(
    services: Services,
    prompt: Prompt,
    identity: Identity,
    sampling: SamplingParams,
    limit: Clock,
    log: TurnLog | None = None,
    *,
    is_alone: bool = False,
) -> AgentContext:
    """Make the context of a trajectory that begins.

    Args:
        is_alone: No other trajectory begins with its prompt.

    Raises:
        ToolError: The prompt names an unknown tool.
    """
    state = TrajectoryState(services, prompt, identity, limit, log)
    history = History(Row(Transcript(), MAIN), state.renderer.reader)
    group_id = "" if is_alone else f"{identity.step}/{identity.uid}"
    return AgentContext(state, history, identity, state.renderer, sampling, group_id=group_id)
