"""Runs one member to its outcome."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import attrs

from rollout.agents.agent_loop import get_agent
from rollout.agents.context import AgentContext
from rollout.agents.identity import Ending, RejectedPrompt
from rollout.agents.kept_messages import KeptMessages
from rollout.agents.prompt_sampling import sampling_of, top_log_probs_fault
from rollout.agents.services import Services
from rollout.agents.trajectory_state import UNRESPONSIVE
from rollout.agents.turn_end import natural_ending
from rollout.chat.reward_values import BadRewardError, apply_reward, check_reward_value
from rollout.errors import (
    AgentError,
    ConfigError,
    SandboxLost,
    TemplateError,
    ToolError,
)
from rollout.observe.user_spans import enter_trajectory
from rollout.scheduling.endings import NEVER_GENERATED
from rollout.scheduling.finished import (
    calls_of,
    end_without_reward,
    exclude,
    finished,
    rejected,
)
from rollout.scheduling.intact import restore
from rollout.scheduling.prompts import trajectory_deadline
from rollout.scheduling.rewards.score import Rewarding
from rollout.scheduling.tokenization import COMPARED, TokenizationCheck
from rollout.scheduling.trajectory_events import tell_started
from rollout.scopes import find_exception
from rollout.types import DRIFT, Cause, Outcome

if TYPE_CHECKING:
    from rollout.agents.agent_loop import Registered
    from rollout.chat.trajectory import Trajectory
    from rollout.limits import Deadline
    from rollout.scheduling.agent_run import AgentRun
    from rollout.scheduling.prompts import Member

logger = logging.getLogger("rollout.scheduling")

#: Reasons of failures that are the engine's or the sandbox's, not the agent's, even where they
#: passed through its code.
ENGINE, SANDBOX = "engine", "sandbox"


@attrs.frozen(kw_only=True)
class TrajectoryRunner:
    """What running members needs; shared by all of them."""

    services: Services
    rewarding: Rewarding
    tokens: TokenizationCheck

    async def run(self, run: AgentRun) -> Trajectory | AgentRun:
        """Run an attempt to its end: the trajectory; or another attempt, see `conclude`."""
        limits, deadline = self.services.config.limits, run.deadline_left
        if self.services.events.is_on:
            tell_started(self.services.events, run)
        if deadline is None:
            deadline = trajectory_deadline(limits, run.member.prompt, run.batch_deadline)
        try:
            loop, context = self._prepare(run, deadline)
        except RejectedPrompt as error:
            return rejected(run.member, error)
        try:
            await run.play(loop, context)
        finally:
            self._note(run)
        return await self.conclude(run)

    async def conclude(self, run: AgentRun) -> Trajectory | AgentRun:
        """The trajectory of an attempt that has ended; whatever happened to it is in its outcome.

        Or another attempt, from the start, for a member whose engine failed a request, whose
        sandbox was lost, or one of whose tools cannot continue. Of a lost replica, whose requests
        resume elsewhere, it learns nothing.
        """
        context, scheduling = run.context, self.services.config.scheduling
        ending, cause = _judged(run)
        is_lost = ending.reason == ENGINE or (
            ending.reason == SANDBOX and _has_lost_sandbox(context)
        )
        if is_lost and run.attempt <= scheduling.max_retries:
            return run.again(calls_of(run))
        log = run.member.log
        if log is not None and context.tools.unrestored and not run.code.was_cancelled:
            log.lose_state(context.tools.unrestored)
            return run.again(calls_of(run))
        drift = None
        if ending.outcome in COMPARED:
            drift, fault = await self.tokens.check(context)
            if fault is not None:
                ending = Ending(outcome=Outcome.FAILED, reason="tokenization")
                cause = Cause(type=TemplateError.__qualname__, message=fault)
        trajectory = finished(run, ending, cause)
        if drift is not None:
            trajectory.metrics[f"{DRIFT}{drift}"] = 1
        if ending.outcome not in scheduling.trainable or not trajectory.generated_length:
            exclude(trajectory)
        if trajectory.trainable:
            await self._reward(run, trajectory)
        sandbox = context.sandbox_asked_for
        if sandbox is not None and sandbox.opened:
            trajectory.metrics["sandboxes"] = sandbox.opened
            trajectory.metrics["sandbox_wait_s"] = sandbox.wait_s
        trajectory.metrics["total_s"] = run.containment.clock() - run.started - _held_s(run.member)
        for segment in trajectory.segments:
            if isinstance(segment.messages, KeptMessages):
                segment.messages.settle()
        return trajectory

    async def _reward(self, run: AgentRun, trajectory: Trajectory) -> None:
        given, events = run.context.reward, self.services.events
        if self.rewarding.single is None:
            if given is not None:
                _take_reward(trajectory, given)
        elif run.containment.clock() < run.batch_deadline.at:
            containment, deadline = run.containment, run.batch_deadline
            if events.is_on:
                enter_trajectory(events, run.member.identity.number)
            await self.rewarding.reward(
                run.member, trajectory, containment, deadline, lambda: run.context.sandbox
            )
        else:  # no time is left to learn its reward
            exclude(trajectory)

    def _note(self, run: AgentRun) -> None:
        """Count what did not end of an attempt; what was of its clean-up is logged."""
        unnamed = [each for each in run.stuck if each is not run.unresponsive]
        self.services.tally.unresponsive += (run.unresponsive is not None) + len(unnamed)
        for each in unnamed:  # it is no cause of the trajectory's
            logger.warning("%s: %s", run.member.identity.session_id, each)

    def _prepare(self, run: AgentRun, deadline: Deadline) -> tuple[Registered, AgentContext]:
        """The loop, and its context.

        Raises:
            RejectedPrompt: The prompt names what does not exist, or overrides wrongly.
        """
        member = run.member
        prompt, identity = member.prompt, member.identity
        if not prompt.messages:
            raise RejectedPrompt("empty_prompt", "messages: expected at least one message")
        try:
            loop = get_agent(prompt.agent_name or self.services.config.agent.name)
        except AgentError as error:
            raise RejectedPrompt("unknown_agent", str(error)) from None
        try:
            sampling = sampling_of(
                self.services.config, prompt.sampling, validate=identity.validate
            )
        except ConfigError as error:
            raise RejectedPrompt("bad_sampling", str(error)) from None
        try:
            self.services.sandboxes.spec_for(prompt.extra)
        except ConfigError as error:
            raise RejectedPrompt("bad_sandbox", f"extra: {error}") from None
        vocab_size = self.services.engines.info.vocab_size
        foreign = [token for token in sampling.stop_token_ids if token >= vocab_size]
        if foreign and vocab_size:
            raise RejectedPrompt(
                "bad_sampling",
                f"sampling.stop_token_ids: {foreign[0]} is outside the engine's vocabulary of "
                f"{vocab_size} ids",
            )
        fault = top_log_probs_fault(sampling.top_log_probs, self.services.engines.info)
        if fault:
            raise RejectedPrompt("bad_sampling", fault)
        log = member.log
        try:
            context = AgentContext(
                self.services,
                prompt,
                identity,
                sampling,
                deadline,
                run.batch_deadline,
                member.hold,
                log,
                is_alone=not run.home.has_groups,
            )
        except ToolError as error:
            raise RejectedPrompt("unknown_tool", str(error)) from None
        if log is not None:
            log.begin()
        return loop, context


def _has_lost_sandbox(context: AgentContext) -> bool:
    """Whether a sandbox that there was has ended; what could not be opened was tried again."""
    sandbox = context.sandbox_asked_for
    return sandbox is not None and isinstance(sandbox.failure, SandboxLost)


def _held_s(member: Member) -> float:
    """How long an agent that has ended was carried."""
    ended = member.concluding_since
    return 0.0 if member.hold is None or ended is None else member.hold.seconds(ended)


def _take_reward(trajectory: Trajectory, given: Any) -> None:
    """The reward that the agent itself gave; no other function does."""
    try:
        apply_reward(trajectory, check_reward_value(given, trajectory, "the agent"))
    except BadRewardError as error:
        end_without_reward(trajectory, Outcome.FAILED, "reward", None, Cause.of(error))


def _judged(run: AgentRun) -> tuple[Ending, Cause | None]:
    """How the attempt ended.

    Raises:
        KeyboardInterrupt: Ctrl-C reached the agent.
    """
    context, error = run.context, run.code.error
    interrupt = None if error is None else find_exception(error, KeyboardInterrupt)
    if interrupt is not None:
        raise interrupt
    if run.unresponsive is not None:
        return Ending(outcome=Outcome.FAILED, reason=UNRESPONSIVE), Cause.of(run.unresponsive)
    fault = restore(context)
    if fault:
        return Ending(outcome=Outcome.FAILED, reason="agent"), Cause.of(AgentError(fault))
    if run.code.was_cancelled:
        return _ending_of_cancelled(run.member, context.deadline.now), None
    sandbox = context.sandbox_asked_for
    if sandbox is not None and sandbox.failure is not None:
        kind, message = type(sandbox.failure).__qualname__, str(sandbox.failure)
        return Ending(outcome=Outcome.FAILED, reason=SANDBOX), Cause(type=kind, message=message)
    if context.ending is not None:
        return context.ending, run.cause
    ending = _natural_ending(context)
    if ending.outcome is not Outcome.COMPLETED or run.tokens or run.member.identity.validate:
        return ending, run.cause
    message = f"{run.what} returned, and the model generated no token for it"
    cause = Cause(type=AgentError.__qualname__, message=message)
    return Ending(outcome=Outcome.FAILED, reason=NEVER_GENERATED), cause


def _ending_of_cancelled(member: Member, deadline: Deadline) -> Ending:
    if member.cancel_reason is not None:
        return Ending(outcome=Outcome.CANCELLED, reason=member.cancel_reason)
    error = (member.over or deadline).error()
    return Ending(outcome=error.outcome, reason=error.reason, limit_source=error.source)


def _natural_ending(context: AgentContext) -> Ending:
    cut_by, last = context.cut_by, None
    if cut_by is not None:
        for span in context.transcript.generated_spans():
            last = span.finish_reason
    return natural_ending(last, cut_by)
