"""Runs one member to its outcome."""

from __future__ import annotations

import copy
import itertools
import logging
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import attrs
import msgspec

from rollout.agents.agent_loop import AgentLoop, get_agent
from rollout.agents.context import AgentContext
from rollout.agents.identity import Ending, RejectedPrompt
from rollout.agents.kept_messages import KeptMessages
from rollout.agents.prompt_sampling import sampling_of, top_log_probs_fault
from rollout.agents.services import Services
from rollout.agents.trajectory_state import UNRESPONSIVE
from rollout.agents.turn_end import natural_ending
from rollout.errors import (
    AgentError,
    ConfigError,
    EngineError,
    LimitExceeded,
    TemplateError,
    ToolError,
)
from rollout.limits import Deadline, PausableDeadline
from rollout.reward_values import BadRewardError
from rollout.scheduling.finished import end_without_reward, exclude, finished, rejected
from rollout.scheduling.intact import restore
from rollout.scheduling.rewards import RewardFunction, apply_reward, compute_reward, reward_of
from rollout.scheduling.tokenization import COMPARED, TokenizationCheck
from rollout.scopes import leaf_of, passing_of
from rollout.supervision import Supervised, UnresponsiveError, is_given_up
from rollout.types import DRIFT, Cause, Outcome, Reward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.chat.trajectory import Trajectory
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

    async def run(self, member: Member, batch_deadline: Deadline) -> Trajectory:
        """One member's trajectory; whatever happens to it is in its outcome.

        A member whose engine failed a request runs again from its start, alone; of a lost replica,
        whose requests resume elsewhere, it learns nothing. The caller's cancellation passes
        through, after tools and requests have been ended.
        """
        started = anyio.current_time()
        limits = self.services.config.limits
        deadline = Deadline.after(limits.trajectory_s, "limits.trajectory_s", batch_deadline)
        discarded = resumes = 0
        restarts: list[str] = []
        for attempt in itertools.count(1):
            try:
                loop, context = self._prepare(member, deadline, batch_deadline)
            except RejectedPrompt as error:
                return rejected(member, error)
            pausable = context.deadline
            ending, cause = await self._run_agent(member, loop, context, pausable)
            deadline = pausable.now
            discarded += context.discarded_tokens
            resumes += context.resumes
            restarts += context.restarts
            if ending.reason != ENGINE or attempt > self.services.config.scheduling.max_retries:
                break
            rows = [row for each in context.main.all() for row in each.rows]
            discarded += sum(row.transcript.generated_length for row in rows)
        drift = None
        if ending.outcome in COMPARED:
            drift, fault = await self.tokens.check(context)
            if fault is not None:
                ending = Ending(outcome=Outcome.FAILED, reason="tokenization")
                cause = Cause(type=TemplateError.__qualname__, message=fault)
        trajectory = finished(member, context, ending, cause)
        if drift is not None:
            trajectory.metrics[f"{DRIFT}{drift}"] = 1
        if ending.outcome not in self.services.config.scheduling.trainable:
            exclude(trajectory)
        trajectory.metrics["attempts"] = attempt
        trajectory.metrics["discarded_tokens"] = discarded
        trajectory.metrics["resumes"] = resumes
        trajectory.metrics["restarts"] = len(restarts)
        if restarts:
            trajectory.extra["restarts"] = restarts
        if self.reward is None and trajectory.trainable and context.reward is not None:
            self._take_reward(trajectory, context.reward)
        elif self.reward is not None and trajectory.trainable:
            if anyio.current_time() < batch_deadline.at:
                await self._reward(member, trajectory, batch_deadline)
            else:  # no time is left to learn its reward
                exclude(trajectory)
        trajectory.metrics["total_s"] = anyio.current_time() - started
        for segment in trajectory.segments:
            if isinstance(segment.messages, KeptMessages):
                segment.messages.settle()
        return trajectory

    def _prepare(
        self, member: Member, deadline: Deadline, batch_deadline: Deadline
    ) -> tuple[type[AgentLoop] | AgentLoop, AgentContext]:
        """The loop, and its context.

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

    async def _run_agent(
        self,
        member: Member,
        loop: type[AgentLoop] | AgentLoop,
        context: AgentContext,
        deadline: PausableDeadline,
    ) -> tuple[Ending, Cause | None]:
        kind = loop if isinstance(loop, type) else type(loop)
        work = self._supervised(f"agent {kind.__name__}", Cause)
        deadline.govern(work)
        failure: BaseException | None = None
        cause: Cause | None = None
        try:
            with _ended_by(member, work):
                cause = await work.run(partial(_run_guarded, loop, context), context.close)
        except BaseException as error:
            if passing_of(error) is not None:
                raise
            failure = error
        finally:
            if work.unresponsive is not None:
                await self._close(member, context)
        fault = restore(context)
        if fault:
            failure = AgentError(fault)
        failure = work.unresponsive or failure
        if failure is not None:
            reason = "agent" if work.unresponsive is None else UNRESPONSIVE
            cause, failure = self._note(failure), None  # its traceback holds this frame
            return Ending(outcome=Outcome.FAILED, reason=reason), cause
        if work.was_cancelled:
            return _ending_of_cancelled(member, deadline.now), None
        return context.ending or _natural_ending(context), cause

    async def _close(self, member: Member, context: AgentContext) -> None:
        """Close what is still open after code was given up, and its task with it."""
        with anyio.CancelScope(shield=True):
            while True:
                work = self._supervised("clean-up of the trajectory", type(None))
                await work.run(context.close)
                if work.unresponsive is None:
                    return
                self._note(work.unresponsive)
                # It is no cause of the trajectory's, and nothing else would name it.
                logger.warning("%s: %s", member.identity.session_id, work.unresponsive)

    def _supervised(self, what: str, kind: type[T]) -> Supervised[T | None]:
        return Supervised(what, cleanup_s=self.services.config.limits.cleanup_s)

    def _note(self, error: BaseException) -> Cause:
        """The cause that `error` is; counted where code was given up."""
        self.services.tally.unresponsive += isinstance(error, UnresponsiveError)
        return Cause.of(error)

    def _take_reward(self, trajectory: Trajectory, given: Any) -> None:
        """The reward that the agent itself gave; no other function does."""
        try:
            apply_reward(trajectory, reward_of(given, trajectory, "the agent"))
        except BadRewardError as error:
            end_without_reward(trajectory, Outcome.FAILED, None, self._note(error))

    async def _reward(
        self, member: Member, trajectory: Trajectory, batch_deadline: Deadline
    ) -> None:
        assert self.reward is not None
        limit_s = self.services.config.limits.reward_s
        deadline = Deadline.after(limit_s, "limits.reward_s", batch_deadline)
        started = anyio.current_time()
        work = self._supervised("the reward function", Reward)
        work.deadline = deadline.at
        # What is assigned to its fields, and to those of its segments, is nobody else's.
        seen = msgspec.structs.replace(
            trajectory, segments=list(map(copy.copy, trajectory.segments))
        )
        failure: BaseException | None = None
        reward: Reward | None = None
        try:
            with _ended_by(member, work):
                reward = await work.run(
                    partial(_reward_of, self.reward, seen, self.services.threads)
                )
        except BaseException as error:
            if passing_of(error) is not None:
                raise
            failure = error
        failure = work.unresponsive or failure
        if failure is not None:
            cause, failure = self._note(failure), None  # its traceback holds this frame
            end_without_reward(trajectory, Outcome.FAILED, None, cause)
            if work.unresponsive is not None:
                trajectory.reason = UNRESPONSIVE
        elif reward is not None:
            apply_reward(trajectory, reward)
        elif member.cancel_reason is not None:
            end_without_reward(trajectory, Outcome.CANCELLED, None, None)
            trajectory.reason = member.cancel_reason
        else:
            end_without_reward(trajectory, Outcome.DEADLINE, deadline.source, None)
        trajectory.metrics["reward_s"] = anyio.current_time() - started


@contextmanager
def _ended_by(member: Member, work: Supervised[Any]) -> Iterator[None]:
    """Cancelling the member cancels this work."""
    member.scope = work
    if member.cancel_reason is not None:
        work.cancel()
    try:
        yield
    finally:
        member.scope = None


async def _reward_of(
    function: RewardFunction, trajectory: Trajectory, threads: WorkerThreads
) -> Reward:
    activity = f"reward of trajectory {trajectory.uid}/{trajectory.member}"  # noqa: F841
    return await compute_reward(function, trajectory, threads)


async def _run_guarded(loop: type[AgentLoop] | AgentLoop, context: AgentContext) -> Cause | None:
    """Run the agent; what it raises settles the outcome, and its root cause is returned."""
    activity = f"trajectory {context.identity.session_id}"  # noqa: F841  (see observe.loop_lag)
    try:
        try:
            await (loop if isinstance(loop, AgentLoop) else loop()).run(context)
        except LimitExceeded as error:
            context.end(error.outcome, error.reason, limit_source=error.source)
        await context.score()
    except BaseException as error:
        passing = error if is_given_up() else passing_of(error)
        try:
            if passing is error:
                raise
            if passing is not None:
                raise passing from None
        finally:
            del passing  # its traceback holds this frame, and only the collector would end that
        return _failed(context, error)
    return None


def _failed(context: AgentContext, error: BaseException) -> Cause | None:
    """Settle the outcome of an agent that raised; the root cause, where that is not known yet."""
    leaf = leaf_of(error) if isinstance(error, BaseExceptionGroup) else error
    if isinstance(leaf, LimitExceeded):
        context.end(leaf.outcome, leaf.reason, limit_source=leaf.source)
        return None
    if context.ending is not None or isinstance(leaf, UnresponsiveError):
        return None  # the agent's own words for a limit that had fired, or that it was given up
    if isinstance(leaf, RejectedPrompt):
        context.end(Outcome.REJECTED, leaf.reason)
    else:
        context.end(Outcome.FAILED, leaf.reason if isinstance(leaf, EngineError) else "agent")
    return Cause.of(leaf)


def _ending_of_cancelled(member: Member, deadline: Deadline) -> Ending:
    if member.cancel_reason is not None:
        return Ending(outcome=Outcome.CANCELLED, reason=member.cancel_reason)
    error = deadline.error()
    return Ending(outcome=error.outcome, reason=error.reason, limit_source=error.source)


def _natural_ending(context: AgentContext) -> Ending:
    ends = [span.finish_reason for span in context.transcript.generated_spans()]
    return natural_ending(ends[-1] if ends else None, context.cut_by)
