"""What an agent loop may do: have the model generate, call tools, ask the user."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from rollout.agents.conversation import Conversation
from rollout.agents.conversation_log import ConversationLog
from rollout.agents.identity import Ending, Identity, RejectedPrompt
from rollout.agents.message_log import MessageLog
from rollout.agents.places import Row
from rollout.agents.trajectory_state import SettlingLimits, TrajectoryState
from rollout.chat.drift import DRIFT_KINDS
from rollout.chat.messages import template_messages, text_of_content
from rollout.chat.trajectory import BRANCH, MAIN, SUBAGENT
from rollout.chat.transcript import Transcript
from rollout.errors import AgentError, ConfigError, LimitExceeded
from rollout.interactions import Interaction, InteractionContext, InteractionTurn
from rollout.limits import Deadline, PausableDeadline, fail_at_deadline
from rollout.supervision import Duty
from rollout.tools.attempt import CallError, attempt
from rollout.types import InvalidToolCall, Message, Outcome, Prompt, ToolCall
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from rollout.agents.services import Services
    from rollout.agents.turn import AssistantTurn
    from rollout.agents.wording import Given
    from rollout.chat.drift import Drift
    from rollout.config import AgentConfig
    from rollout.engine.core import SamplingParams
    from rollout.engine.driver.generation import Generation
    from rollout.tools import ToolResult, TrajectoryTools

T = TypeVar("T")

logger = logging.getLogger("rollout.agents")


class _Shared(Generic[T]):
    """An attribute that the conversations of a trajectory share."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, context: AgentContext, owner: type) -> T:
        if context is None:
            return cast("T", self)
        return cast("T", getattr(context._state, self._name))

    def __set__(self, context: AgentContext, value: T) -> None:
        setattr(context._state, self._name, value)


class AgentContext:
    """One trajectory from the inside.

    Attributes:
        main: The main conversation; `branch` and `subagent` open others. What the context says of a
            conversation is this one's.
        transcript: The exact tokens so far.
        messages: The conversation so far.
        sampling: How the next generation is sampled; assign to change it.
        on_tokens: Called with the `Generation` under way at each of its chunks.
        assistant_turns, user_turns: Generations so far; answers of tools or users so far.
        cut_by: As `AssistantTurn.cut_by`, of the last generation.
        extra: Becomes the trajectory's `extra`; tools, users and rewards see it too.
        turn_scores: What the simulated user gave.
        tool_rewards: What the tools gave.
        ending: The outcome, where it is settled already.
        generation_s: Seconds spent waiting for engines, queueing included, over all conversations.
        resumes: How often a generation continued elsewhere because its replica was lost.
        restarts: Why generations began again then, each time one did.
        discarded_tokens: Tokens that were dropped by that.
    """

    extra = _Shared[dict[str, Any]]()
    turn_scores = _Shared[list[float]]()
    tool_rewards = _Shared[list[float]]()
    ending = _Shared[Ending | None]()
    generation_s = _Shared[float]()
    cached_tokens = _Shared[int]()
    resumes = _Shared[int]()
    restarts = _Shared[list[str]]()
    discarded_tokens = _Shared[int]()

    def __init__(
        self,
        services: Services,
        prompt: Prompt,
        identity: Identity,
        sampling: SamplingParams,
        tools: TrajectoryTools,
        deadline: Deadline,
        extra: dict[str, Any],
        outermost: Deadline,
    ) -> None:
        self._services = services
        self._state = TrajectoryState(services, prompt, identity, tools, deadline, extra, outermost)
        self._main = Conversation(
            self._state,
            ConversationLog(Row(Transcript(), MAIN), MessageLog(self._state.reader)),
            sampling,
            identity,
            group_id=f"{identity.step}/{identity.uid}",
        )
        self._interaction: Interaction | None = None

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
    def deadline(self) -> PausableDeadline:
        """The trajectory's own."""
        return self._state.deadline

    @property
    def tools(self) -> TrajectoryTools:
        """The tools offered to the model; `schemas` lists them."""
        return self._state.tools

    @property
    def main(self) -> Conversation:
        """The conversation that begins with the prompt."""
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
    def sampling(self) -> SamplingParams:
        """How the next generation is sampled; assign to change it."""
        return self._main.sampling

    @sampling.setter
    def sampling(self, sampling: SamplingParams) -> None:
        self._main.sampling = sampling

    @property
    def on_tokens(self) -> list[Callable[[Generation], object]]:
        """Called with the generation under way at each of its chunks."""
        return self._main.on_tokens

    @on_tokens.setter
    def on_tokens(self, readers: list[Callable[[Generation], object]]) -> None:
        self._main.on_tokens = readers

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
    def has_interaction(self) -> bool:
        """Whether a simulated user takes part."""
        return self._interaction_name is not None

    def end(self, outcome: Outcome, reason: str, *, limit_source: str | None = None) -> None:
        """Settle the outcome; return from `run` afterwards. The first call counts."""
        self._state.end(outcome, reason, limit_source=limit_source)

    async def begin(self, messages: Given | None = None) -> None:
        """Render the prompt and start the simulated user; `generate` does so where nobody has.

        Args:
            messages: In place of the prompt's own.
        """
        if self.transcript:
            raise AgentError("begin: the trajectory has begun already")
        given = self.prompt.messages if messages is None else messages
        worded = await self._state.wording.prompt(given)
        self._interaction = self._new_interaction()
        self._main.begin(worded)
        if self._interaction is not None:
            await self._interaction.start(self._interaction_context())

    def generate(self) -> Coroutine[Any, Any, AssistantTurn]:
        """As `Conversation.generate`, awaited; begins the trajectory where nobody has."""
        return self._main.generate() if self.transcript else self._begin_and_generate()

    async def _begin_and_generate(self) -> AssistantTurn:
        await self.begin()
        return await self._main.generate()

    async def call_tools(self, calls: Sequence[ToolCall | InvalidToolCall]) -> list[ToolResult]:
        """As `Conversation.call_tools`."""
        return await self._main.call_tools(calls)

    async def ask_user(self) -> InteractionTurn:
        """Let the simulated user answer; its words are appended unless it is done.

        Raises:
            LimitExceeded: A deadline fired, or its words leave no room for another token.
        """
        if self._interaction is None:
            raise AgentError("ask_user: no interaction takes part in this trajectory")
        await self.settle()
        deadline = self._main.turn_deadline
        with (
            SettlingLimits(self._state, is_main=True),
            Duty("respond of the interaction", deadline.fires_at),
            fail_at_deadline(deadline),
        ):
            turn = await self._interaction.respond(list(template_messages(self.messages)))
        if turn.score is not None:
            self.turn_scores.append(turn.score)
        self.extra.update(turn.extra)
        if not turn.is_done:
            text = text_of_content(f"interaction {self._interaction_name!r}", turn.text)
            words = Message(role="user", content=encodable(text), extra=turn.extra)
            await self._main.answer([words])
        return turn

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

    async def subagent(self, messages: Given, *, purpose: str = SUBAGENT) -> Conversation:
        """As `Conversation.subagent`."""
        return await self._main.subagent(messages, purpose=purpose)

    async def check_tokens(self) -> Drift | None:
        """How transcripts differ from their conversations rendered again: the worst difference.

        None where nothing was compared.

        Raises:
            TemplateError: The template refuses a conversation.
        """
        drifts = [await each.check_tokens() for each in self._main.all()]
        known = [drift for drift in drifts if drift is not None]
        return max(known, key=lambda drift: DRIFT_KINDS.index(drift.kind), default=None)

    async def score(self) -> None:
        """Ask the tools for their final rewards, once all is said.

        Raises:
            LimitExceeded: As `settle`.
        """
        for each in self._main.all():
            await each.settle()
        self.tool_rewards += await self.tools.calc_rewards()

    async def close(self) -> None:
        """End the tools and the simulated user; shielded, bounded, never raises."""
        for each in self._main.all():
            self._services.engines.forget(each.session_id)
        await self.tools.close()
        interaction, self._interaction = self._interaction, None
        if interaction is None:
            return
        limit_s = self._services.config.limits.cleanup_s
        deadline = Deadline.after(limit_s, "limits.cleanup_s")
        try:
            await attempt(
                interaction.finish,
                deadline=deadline,
                what="finish of the interaction",
                shield=True,
            )
        except (CallError, LimitExceeded) as error:
            session = self.identity.session_id
            logger.warning("%s: finish of the interaction failed: %s", session, error)

    def _new_interaction(self) -> Interaction | None:
        name = self._interaction_name
        if name is None:
            return None
        try:
            return self._services.interactions.create(name)
        except ConfigError as error:
            raise RejectedPrompt("unknown_interaction", str(error)) from None

    @property
    def _interaction_name(self) -> str | None:
        return self._interaction_kwargs.get("name") or self.config.interaction

    @property
    def _interaction_kwargs(self) -> Mapping[str, Any]:
        kwargs = self.prompt.extra.get("interaction_kwargs")
        return kwargs if isinstance(kwargs, Mapping) else {}

    def _interaction_context(self) -> InteractionContext:
        return InteractionContext(
            uid=self.identity.uid,
            member=self.identity.member,
            kwargs=dict(self._interaction_kwargs),
            ground_truth=self.prompt.ground_truth,
            extra=self.extra,
            threads=self._services.threads,
        )
