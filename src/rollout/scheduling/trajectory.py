"""The life of a trajectory, from its admission to its outcome: see `run_trajectory`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from rollout.agents.agent_loop import AgentLoop, find_class, get_agent, make_agent
from rollout.agents.context import AgentContext, list_segments
from rollout.agents.ending import Ending, RejectedPrompt
from rollout.agents.generating import find_natural_ending
from rollout.agents.prompt_sampling import make_sampling
from rollout.agents.services import Services
from rollout.agents.trajectory_state import UNRESPONSIVE, TrajectoryState
from rollout.chat.reward_values import BadRewardError, apply_reward, check_reward_value
from rollout.containment import Contained, UnresponsiveError
from rollout.engine.core import SamplingParams
from rollout.engine.cores.checks import find_sampling_fault
from rollout.errors import (
    AgentError,
    ConfigError,
    EngineError,
    LimitExceeded,
    SandboxLost,
    ToolError,
)
from rollout.limits import AGENT_TIMEOUT, AGENT_TIMEOUT_S, Clock, Deadline
from rollout.observe.user_spans import enter_trajectory
from rollout.scheduling.endings import (
    CLOSED,
    NEVER_GENERATED,
    end_without_reward,
    exclude,
    explain_cut,
    make_trajectory,
    make_unstarted,
)
from rollout.scheduling.members import GROUP_S, Member
from rollout.scheduling.rewards.functions import LoadedReward
from rollout.scheduling.rewards.score import RewardCall
from rollout.scheduling.tokenization import TokenizationCheck
from rollout.scheduling.trajectory_events import emit_started
from rollout.scopes import find_exception, unwrap_group
from rollout.types import DRIFT, Cause, Outcome
from rollout.utf8 import is_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.agents.agent_loop import Registered
    from rollout.chat.trajectory import Trajectory
    from rollout.config import LimitsConfig
    from rollout.types import Prompt

logger = logging.getLogger("rollout.scheduling")

#: Reasons of failures of an engine or a sandbox, even where they passed through the agent's code.
ENGINE, SANDBOX = "engine", "sandbox"
#: Of the attempts before the first.
_NO_COUNTS: Mapping[str, float] = {}
#: What an agent may have put something in the place of.
_CONTEXT_NAMES = frozenset(dir(AgentContext))


def limit_trajectory(
    limits: LimitsConfig, prompt: Prompt, of_group: Deadline | None = None
) -> Deadline:
    """Make the deadline of a trajectory that starts, or continues, now: of all, the earliest."""
    own = prompt.extra.get(AGENT_TIMEOUT_S)
    deadlines = [] if of_group is None else [of_group]
    deadlines.append(Deadline.after(limits.trajectory_s, "limits.trajectory_s"))
    if own is not None:
        deadlines.append(Deadline.after(own, AGENT_TIMEOUT))
    return min(deadlines, key=lambda each: each.at)


@attrs.frozen(kw_only=True)
class TrajectoryRunner:
    """What all trajectories of a runtime share.

    Attributes:
        samplings: Of prompts that override nothing of it, by whether they validate.
        reward, group_reward: The functions of a trajectory and of a group.
    """

    services: Services
    tokens: TokenizationCheck
    reward: LoadedReward | None = None
    group_reward: LoadedReward | None = None
    samplings: tuple[SamplingParams, SamplingParams] = attrs.field(init=False)

    @samplings.default
    def _make_samplings(self) -> tuple[SamplingParams, SamplingParams]:
        config = self.services.config
        return make_sampling(config, validate=False), make_sampling(config, validate=True)


@attrs.define(eq=False, weakref_slot=False)
class TrajectoryRun:
    """The state of a trajectory while it runs: its present attempt, and sums of those before.

    Attributes:
        clock: The member's.
        started: When the first attempt began, on the loop's clock.
        attempt: The number of the present one, from 1.
        context, code: Its agent's, once that runs.
        stuck: Clean-up that did not end.
        restarts, counts: Of the attempts before, for the metrics.
    """

    services: Services
    member: Member
    clock: Clock
    started: float
    attempt: int = 1
    context: AgentContext = attrs.field(init=False)
    code: Contained[None] = attrs.field(init=False)
    stuck: tuple[UnresponsiveError, ...] = ()
    restarts: tuple[str, ...] = ()
    counts: Mapping[str, float] = _NO_COUNTS

    @property
    def unresponsive(self) -> UnresponsiveError | None:
        """Why the agent, what it called, or the close of a tool did not end; None: all did."""
        first = self.code.unresponsive
        has_failed = self.code.error is not None or self.code.was_cancelled
        return self.stuck[0] if first is None and self.stuck and not has_failed else first

    @property
    def tokens(self) -> int:
        """Tokens sampled in this attempt."""
        return sum(each.sampled_tokens for each in self.context.all())

    def cancel(self) -> None:
        """Cancel the agent."""
        self.code.cancel()
        self.clock.end_wait()

    def begin_again(self) -> None:
        """Begin another attempt, from the start; the tokens of this one are discarded."""
        self.counts = _sum_counts(self, discarded_tokens=self.tokens)
        self.restarts += self.context.state.restarts
        self.attempt += 1
        self.stuck = ()


async def run_trajectory(runner: TrajectoryRunner, member: Member) -> Trajectory:
    """Run a member from its admission to its outcome; its trajectory says what happened to it.

    The agent runs in a task of its own, within the trajectory's limits. It runs again, from the
    start, where its engine failed a request or its sandbox was lost, and with `refill_failed` where
    it failed otherwise; of a lost replica, whose requests resume elsewhere, it learns nothing. Then
    how it ended is judged, and the reward is called, while the sandbox is still open.

    Cancellation ends the agent or the reward, bounded, and passes through.
    """
    services, clock = runner.services, member.clock
    assert clock is not None
    run = TrajectoryRun(services, member, clock, clock.now())
    while True:
        emit_started(services.events, member, run.attempt, run.started)
        try:
            agent, run.context = _open_context(runner, run)
        except RejectedPrompt as error:
            return make_unstarted(member, _reject(error))
        try:
            _start_agent(run, agent)
            try:
                await run.code.run(partial(_run_agent, agent, run.context))
            finally:
                await _end_agent(run)
            await anyio.lowlevel.checkpoint_if_cancelled()
            ending = _decide_outcome(run)
            if find_class(agent)._may_run_again and _runs_again(run, ending):
                run.begin_again()
                continue
            if member.deadline_met is not None and member.deadline_met.source == GROUP_S:
                member.deadline_met = None  # a group's time ends agents, not their rewards
            drift, ending = await runner.tokens.check(run.context, ending)
            trajectory = _make_trajectory(run, ending)
            if drift is not None:
                trajectory.metrics[f"{DRIFT}{drift}"] = 1
            trainable = services.config.scheduling.trainable
            if trajectory.outcome not in trainable or not trajectory.generated_length:
                exclude(trajectory)
            if trajectory.trainable:
                await _reward(runner, run, trajectory)
            _add_times(run, trajectory)
            return trajectory
        finally:
            run.clock.owner, sandbox = None, run.context.state.used_sandbox
            del run.context  # it may be long until somebody takes the trajectory
            if sandbox is not None and sandbox.was_used:
                await sandbox.close()


def _open_context(runner: TrajectoryRunner, run: TrajectoryRun) -> tuple[Registered, AgentContext]:
    """Find the agent, and make its context.

    Raises:
        RejectedPrompt: The prompt names what does not exist, or overrides wrongly.
    """
    member, services, config = run.member, run.services, run.services.config
    prompt, identity = member.prompt, member.identity
    if not prompt.messages:
        raise RejectedPrompt("empty_prompt", "messages: expected at least one message")
    with _rejecting(AgentError, "unknown_agent"):
        agent = get_agent(prompt.agent_name or config.agent.name)
    with _rejecting(ConfigError, "bad_sampling"):
        sampling = runner.samplings[identity.validate]
        if prompt.sampling:
            sampling = make_sampling(config, prompt.sampling, validate=identity.validate)
    with _rejecting(ConfigError, "bad_sandbox", "extra: "):
        services.sandboxes.spec_for(prompt.extra)
    fault = find_sampling_fault(sampling, services.engines.info)
    if fault:
        raise RejectedPrompt("bad_sampling", fault)
    with _rejecting(ToolError, "unknown_tool"), _rejecting(ConfigError, "unknown_interaction"):
        state = TrajectoryState(services, prompt, identity, run.clock, member.log)
    group_id = f"{identity.step}/{identity.uid}" if member.group.is_shared else ""
    context = AgentContext(state, sampling, group_id)
    if member.log is not None:
        member.log.begin()
    return agent, context


@contextmanager
def _rejecting(kind: type[Exception], reason: str, where: str = "") -> Iterator[None]:
    """Reject the prompt for this reason where the block raises such an error."""
    try:
        yield
    except kind as error:
        raise RejectedPrompt(reason, f"{where}{error}") from None


def _start_agent(run: TrajectoryRun, agent: Registered) -> None:
    """Make the agent's task ready; from now on cancelling the member ends it."""
    containment, context = run.services.containment, run.context
    run.code = Contained(containment, _agent_name(agent), activity=context.identity)
    run.clock.govern(run.code.scope)
    run.member.concluding_since = None
    run.member.set_running(run)


async def _end_agent(run: TrajectoryRun) -> None:
    """Settle how the agent ended, where it raised, and close its tools."""
    member, context = run.member, run.context
    run.clock.release()
    run.clock.cancel_all()
    member.running, member.concluding_since = None, run.clock.now()
    for name in vars(context).keys() & _CONTEXT_NAMES:
        delattr(context, name)  # the agent has put something in the place of a method
    if run.code.error is not None:
        _settle_failure(context, run.code.error)
    await _close(run)
    unnamed = [each for each in run.stuck if each is not run.unresponsive]
    run.services.tally.unresponsive += (run.unresponsive is not None) + len(unnamed)
    for each in unnamed:  # it is no cause of the trajectory's
        logger.warning("%s: %s", member.identity.session_id, each)


async def _run_agent(agent: Registered, context: AgentContext) -> None:
    """Run it in its task, and ask its tools for their rewards."""
    if context.services.events.is_on:
        enter_trajectory(context.services.events, context.identity.number)
    loop = make_agent(agent)
    try:
        if context.services.tools.opens_first:
            await context.state.open_first()
        await loop.run(context)
    except LimitExceeded as error:
        context.end(error.outcome, error.reason, limit_source=error.source)
    await context.score()


async def _close(run: TrajectoryRun) -> None:
    while True:
        try:
            return await run.context.close()
        except UnresponsiveError as error:  # of one of its tools
            run.stuck = (*run.stuck, error)


def _agent_name(agent: Registered) -> str:
    kind = find_class(agent)
    name = type(agent).__name__ if kind is AgentLoop else kind.__name__
    return f"agent {getattr(agent, '__name__', name)}"


def _settle_failure(context: AgentContext, error: BaseException) -> None:
    """Settle the outcome of an agent that raised, unless one is: of a limit that fired before."""
    state, leaf = context.state, unwrap_group(error)
    if isinstance(leaf, LimitExceeded):
        try:
            state.end(leaf.outcome, leaf.reason, limit_source=leaf.source)
        except AgentError as fault:  # an agent has changed it
            _settle_failure(context, fault)
    elif state.ending is None and isinstance(leaf, RejectedPrompt):
        state.ending = _reject(leaf)
    elif state.ending is None and not isinstance(leaf, UnresponsiveError):
        reason = leaf.reason if isinstance(leaf, EngineError) else "agent"
        state.ending = Ending.fail(reason if is_name(reason) else "agent", leaf)


def _reject(error: RejectedPrompt) -> Ending:
    return Ending(outcome=Outcome.REJECTED, reason=error.reason, cause=Cause.of(error))


def _decide_outcome(run: TrajectoryRun) -> Ending:
    """Decide how the attempt ended, by the first of these rules that applies.

    Raises:
        KeyboardInterrupt: Ctrl-C reached the agent.
    """
    context, error = run.context, run.code.error
    interrupt = None if error is None else find_exception(error, KeyboardInterrupt)
    if interrupt is not None:
        raise interrupt
    if run.unresponsive is not None:
        return Ending.fail(UNRESPONSIVE, run.unresponsive)
    has_swallowed = run.code.scope.cancel_called and error is None
    if run.code.was_cancelled or has_swallowed:
        return _decide_cancelled(run)
    sandbox = context.state.used_sandbox
    if sandbox is not None and sandbox.failure is not None:
        cause = Cause(type=type(sandbox.failure).__qualname__, message=str(sandbox.failure))
        return Ending(outcome=Outcome.FAILED, reason=SANDBOX, cause=cause)
    if context.state.ending is not None:
        return context.state.ending
    last = None
    if context.cut_by is not None:
        for span in context.transcript.generated_spans():
            last = span.finish_reason
    ending = find_natural_ending(last, context.cut_by)
    if ending.outcome is not Outcome.COMPLETED or run.tokens or run.member.identity.validate:
        return ending
    message = f"{run.code.what} returned, and the model generated no token for it"
    return Ending.fail(NEVER_GENERATED, AgentError(message))


def _decide_cancelled(run: TrajectoryRun) -> Ending:
    member, clock = run.member, run.clock
    if member.is_ending or clock.is_over:
        return explain_cut(member, member.deadline_met or clock.deadline)
    return Ending(outcome=Outcome.CANCELLED, reason=CLOSED)  # no limit has ended it


def _runs_again(run: TrajectoryRun, ending: Ending) -> bool:
    """Whether the member gets another attempt."""
    most = run.services.config.scheduling.max_retries
    if ending.outcome is not Outcome.FAILED or run.attempt > most:
        return False
    sandbox = run.context.state.used_sandbox
    has_lost_sandbox = sandbox is not None and isinstance(sandbox.failure, SandboxLost)
    is_lost = ending.reason == ENGINE or (ending.reason == SANDBOX and has_lost_sandbox)
    is_over = run.member.is_ending or run.clock.is_over
    return is_lost or (run.member.group.refill_failed and not is_over)


def _make_trajectory(run: TrajectoryRun, ending: Ending) -> Trajectory:
    """Make the trajectory of a member whose last attempt has ended.

    It fails, and keeps its tokens, where the agent put what is no number into its context's lists.
    """
    context, run.member.prompt = run.context, run.context.prompt  # as the agent saw it
    restarts = [*run.restarts, *context.state.restarts]
    if restarts:
        context.extra["restarts"] = restarts
    trajectory = make_trajectory(
        run.member,
        ending,
        transcript=context.transcript,
        num_turns=context.user_turns + context.assistant_turns + 1,
        metrics=_metrics(run, len(restarts)),
        extra=context.extra,
        messages=context.messages,
        history=context.history,
        segments=list_segments(context.all()),
    )
    try:
        trajectory.turn_scores = _check_numbers("turn_scores", context.turn_scores)
        trajectory.tool_rewards = _check_numbers("tool_rewards", context.tool_rewards)
    except AgentError as error:
        end_without_reward(trajectory, Ending.fail("agent", error))
    return trajectory


def _check_numbers(name: str, values: list[Any]) -> list[float]:
    for value in values:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise AgentError(f"context.{name} has a {type(value).__name__}; expected numbers")
    return values


def _sum_counts(run: TrajectoryRun, discarded_tokens: int = 0) -> dict[str, float]:
    """Sum what all attempts so far did; of ``tool/TOOL/seconds_max``, take the maximum.

    Args:
        discarded_tokens: Those of the present one that are discarded with it.
    """
    state = run.context.state
    counts: dict[str, float] = {
        "tool_calls": 0,
        "tool_errors": 0,
        "discarded_tokens": state.discarded_tokens + discarded_tokens,
        "resumes": state.resumes,
    }
    if (tools := state.used_tools) is not None:
        for call in tuple(tools.running):  # of code that was stopped: they will not end
            tools.end_call(call)
        counts |= {"tool_calls": tools.calls, "tool_errors": tools.errors, **tools.counts}
    for name, value in run.counts.items():
        known = counts.get(name, 0.0)
        counts[name] = max(known, value) if name.endswith("/seconds_max") else known + value
    return counts


def _metrics(run: TrajectoryRun, restarts: int) -> dict[str, float]:
    context, tools = run.context, run.context.state.used_tools
    rare = ("cut_prompt_tokens", "sampled_placeholders", "truncated_tokens", "pinned_calls")
    return {
        "generation_s": context.state.generation_s,
        "tool_s": 0.0 if tools is None else tools.seconds,
        **_sum_counts(run),
        "cached_tokens": context.state.cached_tokens,
        **{name: value for name in rare if (value := getattr(context.state, name))},
        **({} if tools is None else tools.metrics),
        "attempts": run.attempt,
        "restarts": restarts,
    }


async def _reward(runner: TrajectoryRunner, run: TrajectoryRun, trajectory: Trajectory) -> None:
    """Ask for the reward of a trajectory, or take the one that its agent gave."""
    own, events, function = run.context.reward, run.services.events, runner.reward
    if function is None:
        if own is not None:
            try:
                apply_reward(trajectory, check_reward_value(own, trajectory, "the agent"))
            except BadRewardError as error:
                end_without_reward(trajectory, Ending.fail("reward", error))
        return
    if events.is_on:
        enter_trajectory(events, run.member.identity.number)
    sandbox = run.context.sandbox if function.takes_sandbox else None
    await RewardCall(run.services, function, {run.member: trajectory}, sandbox).run()


def _add_times(run: TrajectoryRun, trajectory: Trajectory) -> None:
    sandbox, ended = run.context.state.used_sandbox, run.member.concluding_since
    if sandbox is not None and sandbox.opened:
        trajectory.metrics["sandboxes"] = sandbox.opened
        trajectory.metrics["sandbox_wait_s"] = sandbox.wait_s
    carried_s = 0.0 if ended is None else run.clock.carried_s(ended)
    trajectory.metrics["total_s"] = run.clock.now() - run.started - carried_s
