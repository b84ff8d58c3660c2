"""Runs one member to its outcome."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
import attrs
import msgspec

from rollout.agents.agent_loop import AgentLoop, get_agent
from rollout.agents.context import AgentContext
from rollout.agents.identity import Ending, RejectedPrompt
from rollout.agents.places import segments_of
from rollout.agents.services import Services
from rollout.agents.trajectory_state import UNRESPONSIVE
from rollout.agents.turn_end import natural_ending
from rollout.chat.trajectory import Trajectory
from rollout.chat.transcript import Transcript
from rollout.errors import (
    AgentError,
    ConfigError,
    TemplateError,
    ToolError,
)
from rollout.limits import Deadline
from rollout.scheduling.intact import restore
from rollout.scheduling.prompt_sampling import sampling_of, top_log_probs_fault
from rollout.scheduling.rewards import RewardFunction, apply_reward, compute_reward
from rollout.scheduling.tokenization import COMPARED, TokenizationCheck
from rollout.scopes import passing_of
from rollout.supervision import SupervisedCall
from rollout.types import DRIFT, Cause, Outcome, Reward

if TYPE_CHECKING:
    from rollout.scheduling.agent_run import AgentRun
    from rollout.scheduling.prompts import Member
    from rollout.worker_threads import WorkerThreads

T = TypeVar("T")

logger = logging.getLogger("rollout.scheduling")

#: Reason of a failure that is the engine's, not the agent's, even where it passed through its code.
ENGINE = "engine"


@attrs.frozen(kw_only=True)
class TrajectoryRunner:
    """What running members needs; shared by all of them."""

    services: Services
    reward: RewardFunction | None
    tokens: TokenizationCheck

    @property
    def cleanup_s(self) -> float:
        """How long code has to end once it is cancelled."""
        return self.services.config.limits.cleanup_s

    def start(self, run: AgentRun) -> None:
        """Start an attempt; it is to be concluded at once where the prompt is rejected."""
        limits, deadline = self.services.config.limits, run.deadline_left
        if deadline is None:
            after = Deadline.after
            deadline = after(limits.trajectory_s, "limits.trajectory_s", run.batch_deadline)
        try:
            loop, context = self._prepare(run.member, deadline, run.batch_deadline)
        except RejectedPrompt as error:
            run.reject(error)
        else:
            run.begin(loop, context)

    async def conclude(self, run: AgentRun) -> Trajectory | AgentRun:
        """The trajectory of an attempt that has ended; whatever happened to it is in its outcome.

        Or another attempt, from the start, for a member whose engine failed a request. Of a lost
        replica, whose requests resume elsewhere, it learns nothing.
        """
        if run.rejection is not None:
            return rejected(run.member, run.rejection)
        self.note(run)
        context, scheduling = run.context, self.services.config.scheduling
        ending, cause = _judged(run)
        if ending.reason == ENGINE and run.attempt <= scheduling.max_retries:
            return run.again()
        drift = None
        if ending.outcome in COMPARED:
            drift, fault = await self.tokens.check(context)
            if fault is not None:
                ending = Ending(outcome=Outcome.FAILED, reason="tokenization")
                cause = Cause(type=TemplateError.__qualname__, message=fault)
        trajectory = _trajectory(run, ending, cause)
        if drift is not None:
            trajectory.metrics[f"{DRIFT}{drift}"] = 1
        if ending.outcome not in scheduling.trainable:
            _exclude(trajectory)
        if self.reward is not None and trajectory.trainable:
            if anyio.current_time() < run.batch_deadline.at:
                await self._reward(run, trajectory)
            else:  # no time is left to learn its reward
                _exclude(trajectory)
        trajectory.metrics["total_s"] = anyio.current_time() - run.started
        for conversation in context.main.all():
            conversation.messages.settle()
        return trajectory

    def note(self, run: AgentRun) -> None:
        """Count what was given up of an attempt; what was of its clean-up is logged."""
        self.services.tally.unresponsive += (run.unresponsive is not None) + len(run.stuck)
        for each in run.stuck:  # it is no cause of the trajectory's, and nothing else would name it
            logger.warning("%s: %s", run.member.identity.session_id, each)

    def _prepare(
        self, member: Member, deadline: Deadline, batch_deadline: Deadline
    ) -> tuple[type[AgentLoop], AgentContext]:
        """The class of the loop, and its context.

        Raises:
            RejectedPrompt: The prompt names what does not exist, or overrides wrongly.
        """
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
        extra = dict(prompt.extra)  # one for the trajectory and its tools
        try:
            tools = self.services.tools.open_session(
                uid=identity.uid,
                member=identity.member,
                names=prompt.tools,
                tools_kwargs=prompt.tools_kwargs,
                extra=extra,
            )
        except ToolError as error:
            raise RejectedPrompt("unknown_tool", str(error)) from None
        context = AgentContext(
            self.services, prompt, identity, sampling, tools, deadline, extra, batch_deadline
        )
        return loop, context

    async def _reward(self, run: AgentRun, trajectory: Trajectory) -> None:
        assert self.reward is not None
        member, started = run.member, anyio.current_time()
        limit_s = self.services.config.limits.reward_s
        deadline = Deadline.after(limit_s, "limits.reward_s", run.batch_deadline)
        work = SupervisedCall[Reward](run.supervision, "the reward function")
        work.deadline = deadline.fires_at
        # What is assigned to its fields, and to those of its segments, is nobody else's.
        seen = msgspec.structs.replace(
            trajectory, segments=list(map(copy.copy, trajectory.segments))
        )
        failure: BaseException | None = None
        reward: Reward | None = None
        member.give_scope(work)
        try:
            reward = await work.run(partial(_reward_of, self.reward, seen, self.services.threads))
        except BaseException as error:
            if passing_of(error) is not None:
                raise
            failure = error
        finally:
            member.scope = None
        self.services.tally.unresponsive += work.unresponsive is not None
        failure = work.unresponsive or failure
        if failure is not None:
            cause, failure = Cause.of(failure), None  # its traceback holds this frame
            _end_without_reward(trajectory, Outcome.FAILED, None, cause)
            if work.unresponsive is not None:
                trajectory.reason = UNRESPONSIVE
        elif reward is not None:
            apply_reward(trajectory, reward)
        elif member.cancel_reason is not None:
            _end_without_reward(trajectory, Outcome.CANCELLED, None, None)
            trajectory.reason = member.cancel_reason
        else:
            _end_without_reward(trajectory, Outcome.DEADLINE, deadline.source, None)
        trajectory.metrics["reward_s"] = anyio.current_time() - started


async def _reward_of(
    function: RewardFunction, trajectory: Trajectory, threads: WorkerThreads
) -> Reward:
    activity = f"reward of trajectory {trajectory.uid}/{trajectory.member}"  # noqa: F841
    return await compute_reward(function, trajectory, threads)


def _judged(run: AgentRun) -> tuple[Ending, Cause | None]:
    """How the attempt ended.

    Raises:
        BaseException: What is not the agent's own: Ctrl-C, or cancellation from outside.
    """
    context = run.context
    failure: BaseException | None = None
    cause: Cause | None = None
    try:
        cause = run.result()
    except BaseException as error:
        if passing_of(error) is not None:
            raise
        failure = error
    fault = restore(context)
    if fault:
        failure = AgentError(fault)
    failure = run.unresponsive or failure
    if failure is not None:
        reason = "agent" if run.unresponsive is None else UNRESPONSIVE
        cause, failure = Cause.of(failure), None  # its traceback holds this frame
        return Ending(outcome=Outcome.FAILED, reason=reason), cause
    if run.was_cancelled:
        return _ending_of_cancelled(run.member, context.deadline.now), None
    return context.ending or _natural_ending(context), cause


def _ending_of_cancelled(member: Member, deadline: Deadline) -> Ending:
    if member.cancel_reason is not None:
        return Ending(outcome=Outcome.CANCELLED, reason=member.cancel_reason)
    error = deadline.error()
    return Ending(outcome=error.outcome, reason=error.reason, limit_source=error.source)


def _natural_ending(context: AgentContext) -> Ending:
    ends = [span.finish_reason for span in context.transcript.generated_spans()]
    return natural_ending(ends[-1] if ends else None, context.cut_by)


def _exclude(trajectory: Trajectory) -> None:
    """Nothing of it is trained on, and no reward of it is known."""
    trajectory.trainable, trajectory.reward = False, None
    for segment in trajectory.segments:
        segment.reward = segment.token_rewards = None


def _end_without_reward(
    trajectory: Trajectory, outcome: Outcome, source: str | None, cause: Cause | None
) -> None:
    """A trajectory whose reward is unknown keeps its tokens, and is not trained on."""
    trajectory.outcome, trajectory.reason = outcome, "reward"
    trajectory.limit_source, trajectory.cause = source, cause
    _exclude(trajectory)


def _trajectory(run: AgentRun, ending: Ending, cause: Cause | None) -> Trajectory:
    identity, context, tools = run.member.identity, run.context, run.context.tools
    restarts = [*run.restarts, *context.restarts]
    if restarts:
        context.extra["restarts"] = restarts
    return Trajectory(
        uid=identity.uid,
        group=identity.group,
        member=identity.member,
        transcript=context.transcript,
        outcome=ending.outcome,
        reason=ending.reason,
        limit_source=ending.limit_source,
        cause=cause,
        turn_scores=context.turn_scores,
        tool_rewards=context.tool_rewards,
        num_turns=context.user_turns + context.assistant_turns + 1,
        metrics={
            "generation_s": context.generation_s,
            "tool_s": tools.seconds,
            "tool_calls": tools.calls,
            "tool_errors": tools.errors,
            "cached_tokens": context.cached_tokens,
            **tools.metrics,
            "attempts": run.attempt,
            "discarded_tokens": run.discarded + context.discarded_tokens,
            "resumes": run.resumes + context.resumes,
            "restarts": len(restarts),
        },
        extra=context.extra,
        prompt=run.member.prompt,
        messages=context.messages,
        history=context.config.history,
        segments=segments_of(context.main.all()),
    )


def rejected(member: Member, error: RejectedPrompt) -> Trajectory:
    """The trajectory of a member whose prompt cannot be run."""
    return ended_before_start(
        member, Ending(outcome=Outcome.REJECTED, reason=error.reason), Cause.of(error)
    )


def ended_before_start(member: Member, ending: Ending, cause: Cause | None = None) -> Trajectory:
    """The trajectory of a member whose agent never ran: an outcome and no tokens."""
    return Trajectory(
        uid=member.identity.uid,
        group=member.identity.group,
        member=member.identity.member,
        transcript=Transcript(),
        outcome=ending.outcome,
        reason=ending.reason,
        limit_source=ending.limit_source,
        cause=cause,
        trainable=False,
        extra=dict(member.prompt.extra),
        prompt=member.prompt,
    )
