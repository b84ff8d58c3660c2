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
from rollout.scheduling.rewards.functions import LoadedReward, RewardFunctions
from rollout.scheduling.rewards.processes import RewardProcesses, RewardRaisedError
from rollout.scheduling.trajectory_events import emit_rewarded
from rollout.scopes import find_exception
from rollout.types import Cause, Outcome, Reward
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.scheduling.member_group import Ended, Member

logger = logging.getLogger("rollout.scheduling")

#: Pauses between retries double up to this.
MAX_PAUSE_S = 30.0
LIMIT = "limits.reward_s"
#: Reasons of trajectories whose reward is not known.
REWARD_REASON, GROUP_REWARD_REASON = "reward", "group_reward"


@attrs.frozen
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
        is_group: Whether it rewards a group.
        what: Whose reward it is, for messages.

    Attributes:
        since: When it was made, on the loop's clock.
        tokens: None: it samples none.
    """

    tokens = None

    def __init__(
        self, containment: Containment, members: Sequence[Member], what: str, *, is_group: bool
    ) -> None:
        self.members, self.is_group, self.what = members, is_group, what
        self.since = anyio.current_time()
        self.reason = GROUP_REWARD_REASON if is_group else REWARD_REASON
        self.who = GROUP_REWARD if is_group else REWARD
        self._containment = containment
        self._code: Contained[Any]
        self._deadline: Deadline | None = None

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it: the members were cancelled, or their time is over."""
        return all(member.is_ending for member in self.members)

    def cancel(self) -> None:
        """One of the members is cancelled, or its time is over."""
        if self.is_over:
            self._code.cancel()

    def begin(self, limit_s: float | None) -> None:
        """The function is called: its time begins, or begins again."""
        self._deadline = Deadline.after(limit_s, LIMIT)
        self._code.deadline = self._deadline.at

    async def attempt(self, score: Callable[[], Awaitable[Any]], when_late: str) -> Any:
        """Call `score`, and return its answer, or a `RewardFailure`.

        Args:
            score: Calls the function; no time counts until it calls `begin`.
            when_late: What becomes of a call that is cancelled, for messages.

        Raises:
            KeyboardInterrupt: Ctrl-C reached the function.
        """
        self._deadline = None
        code = self._code = Contained[Any](self._containment, self.who, activity=self.what)
        for member in self.members:
            member.set_running(self)
        try:
            value = await code.run(score)
        except UnresponsiveError as error:
            return RewardFailure(Outcome.FAILED, UNRESPONSIVE, cause=Cause.of(error))
        finally:
            for member in self.members:
                member.running = None
        if code.error is not None:
            interrupt = find_exception(code.error, KeyboardInterrupt)
            if interrupt is not None:
                raise interrupt
            if isinstance(code.error, RewardRaisedError):
                return RewardFailure(Outcome.FAILED, self.reason, cause=code.error.cause)
            return RewardFailure(Outcome.FAILED, self.reason, cause=Cause.of(code.error))
        return self._explain_cancelled(when_late) if value is None else value

    def _explain_cancelled(self, when_late: str) -> RewardFailure:
        if all(member.cancel_reason is not None for member in self.members):
            return RewardFailure(Outcome.CANCELLED, self.members[0].cancel_reason or "")
        met = (member.deadline_met for member in self.members)
        deadline = next((each for each in met if each is not None), self._deadline)
        assert deadline is not None  # nothing else cancels it
        error = deadline.error()
        has_begun = self._deadline is not None
        state = f"had not returned{when_late}" if has_begun else "had not been called"
        message = f"{error}: {self.who} {state}"
        cause = Cause(type=type(error).__qualname__, message=message)
        return RewardFailure(Outcome.DEADLINE, self.reason, deadline.source, cause)


@attrs.frozen(kw_only=True)
class Rewarding:
    """The reward functions of a runtime, and how they are called.

    Attributes:
        containment: Has the tasks of functions.
        functions: Of a trajectory and of a group.
        threads: Where sync functions run.
        processes: Where both run in place of this process; None: they run here.
        tokenizer: Decodes responses for functions that were written for verl.
        limit_s: Seconds of one call, from when it begins.
        retries: How often a call that failed is made again.
        backoff_s: Pause before the first of them; doubled at each further one.
        events: Takes what came of it.
    """

    containment: Containment
    functions: RewardFunctions = attrs.field(factory=RewardFunctions)
    threads: WorkerThreads
    processes: RewardProcesses | None = None
    tokenizer: Any = None
    limit_s: float | None = None
    retries: int = 0
    backoff_s: float = 0.0
    tally: Tally
    events: EventStream

    async def reward(
        self, member: Member, trajectory: Trajectory, get_sandbox: Callable[[], TrajectorySandbox]
    ) -> None:
        """Ask for the reward of a trajectory; where none is learned, its outcome says why.

        Args:
            member: Whose trajectory it is.
            get_sandbox: Gives the trajectory's, for a function that names it.
        """
        function = self.functions.single
        assert function is not None
        what = f"reward of trajectory {trajectory.uid}/{trajectory.member}"
        call = RewardCall(self.containment, [member], what, is_group=False)
        sandbox = get_sandbox() if function.form.takes_sandbox else None
        measured = dict(trajectory.metrics)
        reward = await self._score(call, function, partial(_copy, trajectory), sandbox)
        reward = _restore_metrics(trajectory, measured, reward, call)
        _give_reward(trajectory, reward)
        trajectory.metrics["reward_s"] = anyio.current_time() - call.since
        if self.events.is_on:
            error = str(reward) if isinstance(reward, RewardFailure) else ""
            emit_rewarded(self.events, member, call.since, trajectory.reward, error)

    async def reward_group(self, ended: Sequence[Ended]) -> None:
        """Ask for the rewards of members, which are the wanted ones of their group.

        Those that are not trainable stand in the group, and get none. Where no reward is learned,
        the outcome of the others says why.
        """
        assert self.functions.group is not None
        _end_cancelled(ended)
        trainable = [each for each in ended if each.trajectory.trainable]
        if any(member.deadline_met is not None for _, member, _ in trainable):  # no time is left
            for each in trainable:
                exclude(each.trajectory)
            return
        if not trainable:
            return
        members = [each.member for each in trainable]
        what = f"reward of the group {ended[0].trajectory.uid}"
        call = RewardCall(self.containment, members, what, is_group=True)
        measured = [dict(each.trajectory.metrics) for each in ended]
        rewards = await self._score(call, self.functions.group, partial(_copy_group, ended), None)
        if self.events.is_on:
            error = str(rewards) if isinstance(rewards, RewardFailure) else ""
            emit_rewarded(self.events, members[0], call.since, None, error, is_group=True)
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
        make_subject: Callable[[], Trajectory | Group],
        sandbox: TrajectorySandbox | None,
    ) -> Any:
        """Return the function's answer, checked, or a `RewardFailure`; retried where that helps."""
        begin = partial(call.begin, self.limit_s)
        pause_s, retries_left = 0.0, self.retries

        async def score() -> Any:
            if pause_s:
                await anyio.sleep(pause_s)
            subject = make_subject()
            if self.processes is not None:
                return await self.processes.score(function, subject, self.tokenizer, begin)
            value = await function.call(subject, begin, self.threads, self.tokenizer, sandbox)
            if isinstance(subject, Group):
                return check_group_values(value, subject)
            return check_reward_value(value, subject)

        when_late = ""
        if self.processes is not None:
            when_late = "; its process was killed, and another one takes its place"
        elif function.runs_in_thread:
            when_late = "; its thread is left behind"
        while True:
            answer = await call.attempt(score, when_late)
            if not isinstance(answer, RewardFailure):
                return answer
            self.tally.unresponsive += answer.reason == UNRESPONSIVE
            if not (answer.may_pass and retries_left) or call.is_over:
                return answer
            logger.info("%s: asked again (%s)", call.what, answer)
            pause_s = min(2 * pause_s or self.backoff_s, MAX_PAUSE_S)
            retries_left -= 1


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
        answer = RewardFailure(Outcome.FAILED, call.reason, cause=Cause.of(error))
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
