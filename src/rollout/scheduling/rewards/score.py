"""Asks reward functions for the rewards of trajectories and groups, within their limits."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import attrs
import msgspec

from rollout.agents.trajectory_state import UNRESPONSIVE
from rollout.chat.group import Group
from rollout.chat.reward_values import (
    GROUP_REWARD,
    REWARD,
    apply_reward,
    check_group_values,
    check_metrics,
    check_reward_value,
)
from rollout.containment import Contained, Containment, UnresponsiveError
from rollout.limits import Deadline
from rollout.observe.event_stream import EventStream
from rollout.observe.tally import Tally
from rollout.scheduling.finished import end_without_reward, exclude
from rollout.scheduling.rewards.functions import LoadedReward
from rollout.scheduling.rewards.processes import RewardProcesses, RewardRaisedError
from rollout.scheduling.trajectory_events import tell_rewarded
from rollout.scopes import find_exception
from rollout.types import Cause, Outcome, Reward
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.config import RolloutConfig
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.scheduling.prompts import Ended, Member
    from rollout.scheduling.rewards.functions import RewardFunctions

logger = logging.getLogger("rollout.scheduling")

#: Pauses between retries double up to this.
MAX_PAUSE_S = 30.0
LIMIT = "limits.reward_s"
#: Reasons of trajectories whose reward is not known.
REWARD_REASON, GROUP_REWARD_REASON = "reward", "group_reward"


@attrs.frozen(kw_only=True)
class RewardFailure:
    """Why a reward is not known: what becomes of the trajectory."""

    outcome: Outcome
    reason: str
    source: str | None = None
    cause: Cause | None = None

    @property
    def may_pass(self) -> bool:
        """Whether another call may do better."""
        return self.outcome is Outcome.FAILED or self.source == LIMIT

    def __str__(self) -> str:
        cause = self.cause
        return self.reason if cause is None else f"{cause.type}: {cause.message}"


class RewardCall:
    """A call of a reward function, with its retries; it ends once nobody waits for it.

    Args:
        members: Those that it is to reward.
        containment: Has the function's task.
        deadline: The batch's.
        is_group: Whether it rewards a group.
        what: Whose reward it is, for messages.

    Attributes:
        since: When it was made, on the loop's clock.
    """

    def __init__(
        self,
        members: Sequence[Member],
        containment: Containment,
        deadline: Deadline,
        *,
        is_group: bool,
        what: str,
    ) -> None:
        self.members, self.batch_deadline = members, deadline
        self.is_group, self.what, self.since = is_group, what, anyio.current_time()
        self.reason, self.who = REWARD_REASON, REWARD
        if is_group:
            self.reason, self.who = GROUP_REWARD_REASON, GROUP_REWARD
        self._containment = containment
        self._code: Contained[Any]
        self._deadline = deadline
        self._has_begun = False

    def cancel(self) -> None:
        """One of the members is cancelled, or its time is over."""
        if all(m.cancel_reason is not None or m.over is not None for m in self.members):
            self._code.cancel()

    def begin(self, limit_s: float | None) -> None:
        """The function is called: its time begins, or begins again."""
        self._has_begun = True
        self._deadline = Deadline.after(limit_s, LIMIT, self.batch_deadline)
        self._code.deadline = self._deadline.at

    async def attempt(self, score: Callable[[], Awaitable[Any]], when_late: str) -> Any:
        """What `score` returns, or a `RewardFailure`.

        Args:
            score: Calls the function; until it says `begin`, the batch's deadline counts.
            when_late: What becomes of a call that is cancelled, for messages.

        Raises:
            KeyboardInterrupt: Ctrl-C reached the function.
        """
        self._deadline, self._has_begun = self.batch_deadline, False
        code = self._code = Contained[Any](
            self._containment, self.who, self.batch_deadline.at, activity=self.what
        )
        for member in self.members:
            member.give_scope(self)
        try:
            value = await code.run(score)
        except UnresponsiveError as error:
            return self._fail(error, UNRESPONSIVE)
        finally:
            for member in self.members:
                member.scope = None
        if code.error is not None:
            interrupt = find_exception(code.error, KeyboardInterrupt)
            if interrupt is not None:
                raise interrupt
            return self._fail(code.error, self.reason)
        return self._explain_cancelled(when_late) if value is None else value

    def _fail(self, error: BaseException, reason: str) -> RewardFailure:
        cause = error.cause if isinstance(error, RewardRaisedError) else Cause.of(error)
        return RewardFailure(outcome=Outcome.FAILED, reason=reason, cause=cause)

    def _explain_cancelled(self, when_late: str) -> RewardFailure:
        first = self.members[0]
        if all(member.cancel_reason is not None for member in self.members):
            return RewardFailure(outcome=Outcome.CANCELLED, reason=first.cancel_reason or "")
        deadline = first.over or self._deadline
        error = deadline.error()
        state = f"had not returned{when_late}" if self._has_begun else "had not been called"
        return RewardFailure(
            outcome=Outcome.DEADLINE,
            reason=self.reason,
            source=deadline.source,
            cause=Cause(type=type(error).__qualname__, message=f"{error}: {self.who} {state}"),
        )


@attrs.frozen(kw_only=True)
class Rewarding:
    """The reward functions of a runtime, and how they are called.

    Attributes:
        single: The function of a trajectory.
        group: That of a group.
        threads: Where sync functions run.
        processes: Where both run in place of this process; None: they run here.
        tokenizer: Decodes responses for functions that were written for verl.
        limit_s: Seconds of one call, from when it begins.
        retries: How often a call that failed is made again.
        backoff_s: Pause before the first of them; doubled at each further one.
        events: Takes what came of it.
    """

    single: LoadedReward | None = None
    group: LoadedReward | None = None
    threads: WorkerThreads
    processes: RewardProcesses | None = None
    tokenizer: Any = None
    limit_s: float | None = None
    retries: int = 0
    backoff_s: float = 0.0
    tally: Tally
    events: EventStream

    async def reward(
        self,
        member: Member,
        trajectory: Trajectory,
        containment: Containment,
        deadline: Deadline,
        sandbox: Callable[[], TrajectorySandbox],
    ) -> None:
        """Ask for the reward of a trajectory; where none is learned, its outcome says why.

        Args:
            member: Whose trajectory it is.
            containment: Has the function's task.
            deadline: The batch's.
            sandbox: Gives the trajectory's, for a function that names it.
        """
        assert self.single is not None
        what = f"reward of trajectory {trajectory.uid}/{trajectory.member}"
        call = RewardCall([member], containment, deadline, is_group=False, what=what)
        own_sandbox = sandbox() if self.single.takes_sandbox else None
        measured = dict(trajectory.metrics)
        reward = await self._score(call, self.single, partial(_copy, trajectory), own_sandbox)
        reward = _restore_metrics(trajectory, measured, reward, call)
        _give_reward(trajectory, reward)
        trajectory.metrics["reward_s"] = anyio.current_time() - call.since
        if self.events.is_on:
            error = str(reward) if isinstance(reward, RewardFailure) else ""
            tell_rewarded(self.events, member, call.since, trajectory.reward, error)

    async def reward_group(
        self, ended: Sequence[Ended], containment: Containment, deadline: Deadline
    ) -> None:
        """Ask for the rewards of members, which are the wanted ones of their group.

        Those that are not trainable stand in the group, and get none. Where no reward is learned,
        the outcome of the others says why.
        """
        assert self.group is not None
        _end_cancelled(ended)
        trainable = [each for each in ended if each.trajectory.trainable]
        if not trainable:
            return
        if anyio.current_time() >= deadline.at:  # no time is left to learn it
            for each in trainable:
                exclude(each.trajectory)
            return
        members = [each.member for each in trainable]
        what = f"reward of the group {ended[0].trajectory.uid}"
        call = RewardCall(members, containment, deadline, is_group=True, what=what)
        measured = [dict(each.trajectory.metrics) for each in ended]
        rewards = await self._score(call, self.group, partial(_copy_group, ended), None)
        if self.events.is_on:
            error = str(rewards) if isinstance(rewards, RewardFailure) else ""
            tell_rewarded(self.events, members[0], call.since, None, error, is_group=True)
        _end_cancelled(ended)
        for at, (_, _, trajectory) in enumerate(ended):
            reward = rewards if isinstance(rewards, RewardFailure) else rewards[at]
            reward = _restore_metrics(trajectory, measured[at], reward, call)
            if trajectory.trainable:
                _give_reward(trajectory, reward)
                trajectory.metrics["group_reward_s"] = anyio.current_time() - call.since

    async def _score(
        self,
        call: RewardCall,
        function: LoadedReward,
        subject: Callable[[], Trajectory | Group],
        sandbox: TrajectorySandbox | None,
    ) -> Any:
        """What the function returns, checked, or a `RewardFailure`; retried where that may help."""

        def begin() -> None:
            call.begin(self.limit_s)

        async def score(pause_s: float) -> Any:
            if pause_s:
                await anyio.sleep(pause_s)
            copied = subject()
            if self.processes is not None:
                return await self.processes.score(function, copied, self.tokenizer, begin)
            value = await function.call(copied, begin, self.threads, self.tokenizer, sandbox)
            if isinstance(copied, Group):
                return check_group_values(value, copied)
            return check_reward_value(value, copied)

        when_late = ""
        if self.processes is not None:
            when_late = "; its process was killed, and another one takes its place"
        elif function.runs_in_thread:
            when_late = "; its thread is left behind"
        pause_s = 0.0
        for retries_left in range(self.retries, -1, -1):
            answer = await call.attempt(partial(score, pause_s), when_late)
            if not isinstance(answer, RewardFailure):
                return answer
            self.tally.unresponsive += answer.reason == UNRESPONSIVE
            is_over = anyio.current_time() >= call.batch_deadline.at
            if is_over or not answer.may_pass or not retries_left:
                break
            logger.info("%s: asked again (%s)", call.what, answer)
            pause_s = min(2 * pause_s or self.backoff_s, MAX_PAUSE_S)
        return answer


def make_rewarding(
    config: RolloutConfig,
    functions: RewardFunctions,
    processes: RewardProcesses | None,
    tokenizer: Any,
    threads: WorkerThreads,
    tally: Tally,
    events: EventStream,
) -> Rewarding:
    """What asks the functions for rewards, with the limits of the configuration."""
    return Rewarding(
        single=functions.single,
        group=functions.group,
        threads=threads,
        processes=processes,
        tokenizer=tokenizer,
        limit_s=config.limits.reward_s,
        retries=config.rewards.retries,
        backoff_s=config.rewards.backoff_s,
        tally=tally,
        events=events,
    )


def _give_reward(trajectory: Trajectory, reward: Reward | RewardFailure | None) -> None:
    """Apply a reward, or its failure; None: the group's function has none for this member."""
    if isinstance(reward, RewardFailure):
        end_without_reward(trajectory, reward.outcome, reward.reason, reward.source, reward.cause)
    elif reward is None:
        exclude(trajectory)
    else:
        apply_reward(trajectory, reward)


def _restore_metrics(
    trajectory: Trajectory, measured: dict[str, float], answer: Any, call: RewardCall
) -> Any:
    """Add what the runtime measured to the metrics that the function may have changed.

    Returns the answer; a failure in its place where the function put in what is no metric.
    """
    metrics = trajectory.metrics
    try:
        check_metrics(metrics, call.who)
    except Exception as error:  # also of a number of the function's own
        metrics.clear()
        answer = RewardFailure(outcome=Outcome.FAILED, reason=call.reason, cause=Cause.of(error))
    for name, value in measured.items():
        metrics.setdefault(name, value)
    return answer


def _copy(trajectory: Trajectory) -> Trajectory:
    """A copy: what is assigned to its fields, and to those of its segments, is nobody else's."""
    return msgspec.structs.replace(trajectory, segments=list(map(copy.copy, trajectory.segments)))


def _copy_group(ended: Sequence[Ended]) -> Group:
    first = ended[0].member
    trajectories = [_copy(each.trajectory) for each in ended]
    return Group.of(first.identity.uid, first.named_prompt, trajectories)


def _end_cancelled(ended: Sequence[Ended]) -> None:
    """End those that were cancelled while they waited for their reward."""
    for _, member, trajectory in ended:
        if member.cancel_reason is not None and trajectory.trainable:
            end_without_reward(trajectory, Outcome.CANCELLED, member.cancel_reason, None, None)
