"""What all conversations of a trajectory share: its limits, its tools, its figures."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from rollout.agents.budget import generation_budget
from rollout.agents.identity import Ending, Identity, continued, named
from rollout.agents.kept_messages import TurnReader
from rollout.agents.on_demand import NOT_MADE, ListOnDemand
from rollout.agents.prompt_sampling import sampling_given
from rollout.agents.wording import Wording
from rollout.bridge import loop_clock
from rollout.containment import UnresponsiveError
from rollout.engine.core import WHOLE_ANSWERS
from rollout.errors import AgentError, EngineError, LimitExceeded
from rollout.limits import CARRY_S, NEVER, Deadline
from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
from rollout.types import Outcome, Prompt
from rollout.utf8 import is_encodable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from rollout.agents.services import Services
    from rollout.agents.turn_log import TurnLog
    from rollout.chat.transcript import Transcript
    from rollout.config import AgentConfig
    from rollout.engine.core import SamplingParams
    from rollout.engine.pool.generation import Generation
    from rollout.limits import Clock, Limit
    from rollout.tools import ToolResult, TrajectoryTools

T = TypeVar("T")

logger = logging.getLogger("rollout.agents")

#: Reason of a failure by code that did not end when it was cancelled.
UNRESPONSIVE = "unresponsive"


class TrajectoryState:
    """The part of an `AgentContext` that each of its conversations uses.

    Attributes:
        services: What all trajectories share.
        prompt, identity, tools, extra, reward, turn_scores, tool_rewards, ending, generations,
            generation_s, cached_tokens, resumes, restarts, discarded_tokens: As in `AgentContext`.
        wording: Renders, encodes and reads where the trajectory's own tools are offered.
        clock: The loop's time.
        cut_prompt_tokens: Tokens that the prompt has lost, to fit.
        sampled_placeholders: Turns that ended before one; see `MediaIntake.kept_of`.
        truncated_tokens: Sampled tokens of training rows that top_k, top_p or min_p were set for.
        limit: The trajectory's own, in which all others are opened.
        log: Remembers its answers; None where nothing does.
        idle_since: When its last generation, or its last user's answer, ended; 0 before.
        is_over: Whether its agent has ended, and its tools were closed.
    """

    turn_scores = ListOnDemand()
    tool_rewards = ListOnDemand()
    restarts = ListOnDemand()

    __slots__ = (
        "_calls_asked",
        "_extra",
        "_prompt",
        "_restarts",
        "_sandbox",
        "_tool_rewards",
        "_tools",
        "_turn_scores",
        "cached_tokens",
        "clock",
        "cut_prompt_tokens",
        "discarded_tokens",
        "ending",
        "generation_s",
        "generations",
        "identity",
        "idle_since",
        "is_over",
        "limit",
        "log",
        "resumes",
        "reward",
        "sampled_placeholders",
        "services",
        "truncated_tokens",
        "wording",
    )

    def __init__(
        self,
        services: Services,
        prompt: Prompt,
        identity: Identity,
        limit: Clock,
        log: TurnLog | None = None,
    ) -> None:
        self.services = services
        self.log = log
        self.clock = loop_clock()
        self._tools: TrajectoryTools | None = None
        self.is_over = False
        self._sandbox: TrajectorySandbox | None = None
        self._extra: dict[str, Any] = dict(prompt.extra) if prompt.extra else NOT_MADE
        self.reward: Any = None
        self._turn_scores = self._tool_rewards = self._restarts = NOT_MADE
        self.ending: Ending | None = None
        self.generation_s = self.idle_since = 0.0
        self.cached_tokens = 0
        self.generations = 0
        self.resumes = 0
        self.discarded_tokens = 0
        self.cut_prompt_tokens = 0
        self.sampled_placeholders = self.truncated_tokens = 0
        self._prompt = prompt
        self.identity = identity
        if prompt.tools is not None or prompt.tools_kwargs or services.tools.opens_first:
            names = self.tools.names  # now, since what the prompt says of them may be wrong
        else:
            names = services.tools.names
        self.wording = services.wording_of(
            names, lambda: Wording(services, services.reader_of(names))
        )
        self.limit = limit
        limit.limit_carry = self._limit_carry
        self._calls_asked = 0

    @property
    def config(self) -> AgentConfig:
        """The `agent` section of the configuration."""
        return self.services.config.agent

    @property
    def prompt(self) -> Prompt:
        """What it started from, with its uid."""
        self._prompt = prompt = named(self._prompt, self.identity.uid)
        return prompt

    def continue_prompt(self, observations: Sequence[str | Sequence[Mapping[str, Any]]]) -> None:
        """The last message of the prompt goes on with what tools observed.

        Raises:
            AgentError: It cannot.
        """
        *before, last = self._prompt.messages
        for observation in observations:
            last = continued(last, observation)
        self._prompt = msgspec.structs.replace(self._prompt, messages=[*before, last])

    @property
    def given(self) -> Prompt:
        """The same as its caller gave it, perhaps without a uid."""
        return self._prompt

    @property
    def tools(self) -> TrajectoryTools:
        """Its tools, made when somebody first asks for them.

        Raises:
            ToolError: The prompt names an unknown one; not where they have been made.
        """
        if self._tools is None:
            self._tools = self.services.tools.open_session(
                uid=self.identity.uid,
                member=self.identity.member,
                names=self.services.tools.names_for(self._prompt),
                tools_kwargs=self._prompt.tools_kwargs,
                extra=self.extra,
                prompt=self._prompt,
                sandbox=self.sandbox,
            )
            self._tools.is_closed = self.is_over
        return self._tools

    @property
    def tools_asked_for(self) -> TrajectoryTools | None:
        """The same; None where nobody has asked for them yet."""
        return self._tools

    @property
    def sandbox(self) -> TrajectorySandbox:
        """Its sandbox, which is opened when it is first used."""
        if self._sandbox is None:
            services = self.services
            self._sandbox = TrajectorySandbox(
                services.sandboxes,
                services.sandboxes.spec_for(self._prompt.extra),
                cleanup_s=services.config.limits.cleanup_s,
            )
        return self._sandbox

    @property
    def sandbox_asked_for(self) -> TrajectorySandbox | None:
        """The same; None where nobody has asked for it yet."""
        return self._sandbox

    def check_sandbox(self) -> None:
        """Let the trajectory go on, unless it has lost its sandbox.

        Raises:
            SandboxError: It has, or got none.
        """
        failure = None if self._sandbox is None else self._sandbox.failure
        if failure is not None:
            raise type(failure)(str(failure)) from failure

    @property
    def extra(self) -> dict[str, Any]:
        """One for the trajectory and its tools."""
        if self._extra is NOT_MADE:
            self._extra = {}
        return self._extra

    @extra.setter
    def extra(self, extra: dict[str, Any]) -> None:
        self._extra = extra

    def _limit_carry(self, since: float) -> Deadline:
        """By when it is to be continued, where it is carried since that time."""
        has_sandbox = self._sandbox is not None and self._sandbox.is_open
        if not has_sandbox and (self._tools is None or not self._tools.has_open_sessions()):
            return NEVER
        return Deadline.after(self.services.config.limits.carry_s, CARRY_S, now=since)

    def wording_of(self, tools: Sequence[Mapping[str, Any]] | None) -> Wording:
        """The wording where these tools are offered; None: the trajectory's own."""
        if tools is None:
            return self.wording
        services = self.services
        return Wording(services, TurnReader(services.template, services.parser, tuple(tools)))

    def end(self, outcome: Outcome | str, reason: str, *, limit_source: str | None = None) -> None:
        """Settle the outcome; return from `run` afterwards. The first call counts.

        Raises:
            AgentError: An argument is of another kind; nothing is settled.
        """
        if outcome not in tuple(Outcome):  # the text of a member is equal to it
            raise AgentError(f"end: outcome = {outcome!r:.80}; expected a member of Outcome")
        for name, text in (("reason", reason), ("limit_source", limit_source or "")):
            if not isinstance(text, str) or not is_encodable(text):
                raise AgentError(f"end: {name} = {text!r:.80}; expected a string in UTF-8")
        if self.ending is None:
            self.ending = Ending(outcome=Outcome(outcome), reason=reason, limit_source=limit_source)

    @property
    def has_turns_left(self) -> bool:
        """Whether `agent.max_assistant_turns` allows another generation."""
        most = self.config.max_assistant_turns
        return most is None or self.generations < most

    def check_turns(self) -> None:
        """Let another generation begin.

        Raises:
            LimitExceeded: There are as many as `agent.max_assistant_turns`.
        """
        if not self.has_turns_left:
            raise LimitExceeded(
                f"agent.max_assistant_turns = {self.config.max_assistant_turns} is reached",
                source="agent.max_assistant_turns",
                reason="turns",
            )

    def count_calls(self, count: int) -> None:
        """The model asks for so many calls more.

        Raises:
            LimitExceeded: They are more than `agent.max_tool_calls`.
        """
        most = self.config.max_tool_calls
        self._calls_asked += count
        if most is not None and self._calls_asked > most:
            raise LimitExceeded(
                f"agent.max_tool_calls = {most}: the model asked for {self._calls_asked}",
                source="agent.max_tool_calls",
                reason="tool_calls",
            )

    def count_errors(self, results: list[ToolResult], errors_in_a_row: int) -> int:
        """How many errors in a row there are after `results`, where it were so many before.

        Raises:
            LimitExceeded: They are as many as `agent.max_consecutive_errors`, or those that could
                not be run as `agent.max_consecutive_invalid_calls`.
        """
        config = self.config
        invalid, errors = config.max_consecutive_invalid_calls, config.max_consecutive_errors
        if invalid is not None and self.tools.invalid_in_a_row >= invalid:
            raise LimitExceeded(
                f"agent.max_consecutive_invalid_calls = {invalid} is reached",
                source="agent.max_consecutive_invalid_calls",
                reason="invalid_calls",
            )
        for result in results:
            errors_in_a_row = errors_in_a_row + 1 if result.is_error else 0
        if errors is not None and errors_in_a_row >= errors:
            raise LimitExceeded(
                f"agent.max_consecutive_errors = {errors} is reached",
                source="agent.max_consecutive_errors",
                reason="errors",
            )
        return errors_in_a_row

    def open_turn(self) -> tuple[Limit, Limit]:
        """The limits of a turn, and of its generation, which begin now."""
        limits = self.services.config.limits
        turn = self.limit.open(limits.turn_s, "limits.turn_s")
        return turn, turn.open(limits.generation_s, "limits.generation_s")

    def budget(
        self, transcript: Transcript, sampling: SamplingParams, kept_tokens: int
    ) -> tuple[int, str]:
        """As `generation_budget`."""
        return generation_budget(
            transcript,
            self.services.config.lengths,
            self.services.engines.info.context_length,
            sampling.max_new_tokens,
            kept_tokens,
        )

    def sampling_given(
        self, what: str, sampling: Mapping[str, Any] | SamplingParams
    ) -> SamplingParams:
        """As `prompt_sampling.sampling_given`, for this trajectory's prompt."""
        validate = self.identity.validate
        return sampling_given(what, self.services, self._prompt, sampling, validate=validate)

    def sampling_of_turn(self, sampling: SamplingParams, budget: int, seed: int) -> SamplingParams:
        """How a turn is sampled, in the engine's terms."""
        stops = _union(tuple(sampling.stop_token_ids), self.services.stop_token_ids)
        return msgspec.structs.replace(
            sampling, max_new_tokens=budget, seed=seed, stop_token_ids=stops
        )

    def abort_error(self, session_id: str, deadline: Deadline) -> Exception:
        """Why a generation was aborted that we had not ended."""
        if self.clock() >= deadline.at:
            return deadline.error()  # the engine kept the deadline before we could
        return EngineError(f"{session_id}: the engine aborted the generation")

    def count_tokens(self, generation: Generation, known_tokens: int) -> None:
        """Count what a generation brought, and how much of `known_tokens` its engine still had."""
        self.cached_tokens += generation.cached_tokens
        if generation.last_part is None:
            return  # none arrived, or all of it is remembered
        tally = self.services.tally
        tally.generated_tokens += generation.count
        if generation.finish_reason in WHOLE_ANSWERS:  # others need not say what was cached
            tally.known_tokens += known_tokens
            tally.reused_tokens += min(generation.cached_tokens, known_tokens)

    def note_generation(self, generation: Generation, seconds: float) -> None:
        """Count what a generation took, and what the loss of replicas did to it."""
        self.generation_s += seconds
        self.resumes += generation.resumes
        restarts = generation.restarts
        if restarts:
            self.restarts += restarts
        if restarts or generation.kept is not None:
            self.discarded_tokens += generation.discarded_tokens

    def note_cut(self, tokens: int) -> None:
        """The prompt has lost so many tokens, to fit; said once, then counted."""
        self.cut_prompt_tokens = tokens
        tally = self.services.tally
        if not tally.cut_prompts:
            logger.warning(
                "%s: the prompt has %d tokens too many, which it loses at its beginning "
                "(lengths.overlong_prompts = 'cut'); further ones are counted only",
                self.identity.session_id,
                tokens,
            )
        tally.cut_prompts += 1


class Shared(Generic[T]):
    """A read-only attribute of an `AgentContext` that its trajectory's conversations share."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, context: Any, owner: type) -> T:
        if context is None:
            return cast("T", self)
        value: T = getattr(context._state, self._name)
        return value

    def __set__(self, context: Any, value: Any) -> None:
        raise AttributeError(f"context.{self._name} cannot be assigned")


class OfMain(Generic[T]):
    """An attribute of an `AgentContext` that is its main conversation's."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, context: Any, owner: type) -> T:
        if context is None:
            return cast("T", self)
        value: T = getattr(context._main, self._name)
        return value

    def __set__(self, context: Any, value: T) -> None:
        setattr(context._main, self._name, value)


class SettlingLimits:
    """A limit that fires in its block settles the outcome, even where an agent swallows the error.

    Args:
        settles_lengths: Whether a length that the conversation runs into ends the trajectory, as
            that of a main one does as a rule; else it is the agent's to judge.
    """

    __slots__ = ("_settles_lengths", "_state")

    def __init__(self, state: TrajectoryState, *, settles_lengths: bool) -> None:
        self._state = state
        self._settles_lengths = settles_lengths

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.settle(error)

    def settle(self, error: BaseException) -> None:
        """What ended a block settles the outcome, if it does."""
        if isinstance(error, LimitExceeded):
            if self._settles_lengths or error.outcome is not Outcome.LENGTH:
                self._state.end(error.outcome, error.reason, limit_source=error.source)
        elif isinstance(error, UnresponsiveError):
            self._state.end(Outcome.FAILED, UNRESPONSIVE)


@lru_cache(maxsize=64)
def _union(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that stand in either, sorted: the same few of each turn."""
    return tuple(sorted({*one, *other}))
