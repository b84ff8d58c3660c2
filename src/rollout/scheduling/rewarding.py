"""Gives trajectories and groups their rewards, within their deadlines, whatever happens."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import anyio
import attrs
import msgspec

from rollout.agents.trajectory_state import UNRESPONSIVE
from rollout.chat.group import Group
from rollout.chat.trajectory import Trajectory
from rollout.containment import Contained, Containment, UnresponsiveError
from rollout.limits import Deadline
from rollout.observe.event_stream import EventStream
from rollout.observe.tally import Tally
from rollout.reward_values import check_metrics
from rollout.scheduling.finished import end_without_reward, exclude
from rollout.scheduling.prompts import Member
from rollout.scheduling.reward_processes import RewardRaisedError
from rollout.scheduling.rewards import GROUP_REWARD, REWARD, apply_reward
from rollout.scheduling.scorers import LocalScorer, Scorer
from rollout.scheduling.trajectory_events import tell_rewarded
from rollout.scopes import find_exception
from rollout.types import Cause, Outcome, Reward

if TYPE_CHECKING:
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.scheduling.ended_groups import Ended

logger = logging.getLogger("rollout.scheduling")

A = TypeVar("A")

#: Pauses between retries double up to this.
MAX_PAUSE_S = 30.0
LIMIT = "limits.reward_s"
#: Reasons of trajectories whose reward is not known.
REWARD_REASON, GROUP_REWARD_REASON = "reward", "group_reward"


class _Names(NamedTuple):
    """What a call is called: as a trajectory's reason, in messages, and with what it is about."""

    reason: str
    who: str
    what: str


@attrs.frozen(kw_only=True)
class Unrewarded:
    """Why a reward is not known."""

    outcome: Outcome
    reason: str
    source: str | None = None
    cause: Cause | None = None

    @property
    def may_pass(self) -> bool:
        """Whether another call may do better."""
        return self.outcome is Outcome.FAILED or self.source == LIMIT

    def end(self, trajectory: Trajectory) -> None:
        """Let a trajectory end like that."""
        end_without_reward(trajectory, self.outcome, self.reason, self.source, self.cause)


@attrs.frozen(kw_only=True)
class _Call:
    """Whom a call of a reward function concerns, and until when.

    Attributes:
        members: Those that it is to reward; once all of them are cancelled, or their time is
            over, it is ended.
        containment: Has its task.
        deadline: The batch's.
    """

    members: Sequence[Member]
    containment: Containment
    deadline: Deadline

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants it any more."""
        return all(member.cancel_reason is not None for member in self.members)

    @property
    def over(self) -> Deadline | None:
        """Whose time ended it, where somebody else than its own clock saw to that."""
        return self.members[0].over

    @property
    def is_unwanted(self) -> bool:
        """Whether it is to end, for one reason or the other."""
        return all(m.cancel_reason is not None or m.over is not None for m in self.members)

    async def run(
        self, work: Contained[A], score: Callable[[], Awaitable[A]]
    ) -> tuple[A | None, Cause | None]:
        """What `score` returns, or why it raised; neither where it was cancelled or given up."""
        shared = RewardWork(self, work)
        for member in self.members:
            member.give_scope(shared)
        try:
            answer = await work.run(score)
        except UnresponsiveError:  # `work` says so
            return None, None
        finally:
            for member in self.members:
                member.scope = None
        if work.error is None:
            return answer, None
        interrupt = find_exception(work.error, KeyboardInterrupt)
        if interrupt is not None:
            raise interrupt
        return None, _cause_of(work.error)


@attrs.frozen(kw_only=True)
class Rewarding:
    """The reward functions of a runtime, and how they are called.

    Attributes:
        single: Calls the function of a trajectory; None: there is none.
        group: Calls that of a group; None: there is none.
        limit_s: Seconds of one call, from when it begins.
        retries: How often a call that failed is made again.
        backoff_s: Pause before the first of them; doubled at each further one.
        events: Takes what came of it.
    """

    single: Scorer[Trajectory, Reward] | None
    group: Scorer[Group, list[Reward | None]] | None
    limit_s: float | None
    retries: int
    backoff_s: float
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
        call = _Call(members=[member], containment=containment, deadline=deadline)
        started = anyio.current_time()
        what = f"reward of trajectory {trajectory.uid}/{trajectory.member}"
        names = _Names(REWARD_REASON, REWARD, what)
        measured = dict(trajectory.metrics)
        scorer = self.single
        if isinstance(scorer, LocalScorer) and scorer.takes_sandbox:
            scorer = scorer.with_sandbox(sandbox())
        answer = await self._ask(scorer, partial(_copied, trajectory), call, names)
        answer = _with_metrics(trajectory, measured, answer, names)
        if isinstance(answer, Unrewarded):
            answer.end(trajectory)
        else:
            apply_reward(trajectory, answer)
        trajectory.metrics["reward_s"] = anyio.current_time() - started
        if self.events.is_on:
            tell_rewarded(self.events, member, started, trajectory.reward, _error_of(answer))

    async def reward_group(
        self, ended: Sequence[Ended], containment: Containment, deadline: Deadline
    ) -> None:
        """Ask for the rewards of members, which are the wanted ones of their group.

        Those that are not trainable stand in the group, and get none. Where no reward is learned,
        the outcome of the others says why.
        """
        assert self.group is not None
        _end_cancelled(ended)
        asked = [each for each in ended if each.trajectory.trainable]
        if not asked:
            return
        if anyio.current_time() >= deadline.at:  # no time is left to learn it
            for each in asked:
                exclude(each.trajectory)
            return
        started = anyio.current_time()
        members = [each.member for each in asked]
        call = _Call(members=members, containment=containment, deadline=deadline)
        what = f"reward of the group {ended[0].trajectory.uid}"
        names = _Names(GROUP_REWARD_REASON, GROUP_REWARD, what)
        measured = [dict(each.trajectory.metrics) for each in ended]
        answer = await self._ask(self.group, partial(_group_of, ended), call, names)
        if self.events.is_on:
            tell_rewarded(self.events, members[0], started, None, _error_of(answer), is_group=True)
        _end_cancelled(ended)
        for at, (_, _, trajectory) in enumerate(ended):
            reward = answer if isinstance(answer, Unrewarded) else answer[at]
            reward = _with_metrics(trajectory, measured[at], reward, names)
            if not trajectory.trainable:
                continue
            if isinstance(reward, Unrewarded):
                reward.end(trajectory)
            elif reward is None:
                exclude(trajectory)
            else:
                apply_reward(trajectory, reward)
            trajectory.metrics["group_reward_s"] = anyio.current_time() - started

    async def _ask(
        self,
        scorer: Scorer[Any, A],
        subject: Callable[[], Any],
        call: _Call,
        names: _Names,
    ) -> A | Unrewarded:
        """What the function says; asked again where that may help."""
        for attempt in itertools.count():
            pause_s = min(self.backoff_s * 2 ** (attempt - 1), MAX_PAUSE_S) if attempt else 0.0
            answer = await self._attempt(scorer, subject, call, names, pause_s)
            if not isinstance(answer, Unrewarded) or not answer.may_pass:
                break
            if attempt >= self.retries or anyio.current_time() >= call.deadline.at:
                break
            said = "" if answer.cause is None else f" ({answer.cause.type}: {answer.cause.message})"
            logger.info("%s: asked again%s", names.what, said)
        return answer

    async def _attempt(
        self,
        scorer: Scorer[Any, A],
        subject: Callable[[], Any],
        call: _Call,
        names: _Names,
        pause_s: float,
    ) -> A | Unrewarded:
        work = Contained[A](call.containment, names.who, activity=names.what)
        clock = _Clock(work, self.limit_s, call.deadline)

        async def score() -> A:
            if pause_s:
                await anyio.sleep(pause_s)
            return await scorer.score(subject(), clock.begin)

        ran = await call.run(work, score)
        answer, cause = ran
        if work.unresponsive is not None:
            self.tally.unresponsive += 1
            cause = Cause.of(work.unresponsive)
            return Unrewarded(outcome=Outcome.FAILED, reason=UNRESPONSIVE, cause=cause)
        if cause is not None:
            return Unrewarded(outcome=Outcome.FAILED, reason=names.reason, cause=cause)
        if answer is not None:
            return answer
        if call.is_cancelled:
            return Unrewarded(outcome=Outcome.CANCELLED, reason=call.members[0].cancel_reason or "")
        return clock.over(names, scorer.when_late, call.over)


def _with_metrics(
    trajectory: Trajectory, measured: dict[str, float], answer: A | Unrewarded, names: _Names
) -> A | Unrewarded:
    """The answer; a failure, where the function put what is no metric among those measured."""
    metrics = trajectory.metrics
    try:
        check_metrics(metrics, names.who)
    except Exception as error:  # also of a number of the function's own
        metrics.clear()
        answer = Unrewarded(outcome=Outcome.FAILED, reason=names.reason, cause=Cause.of(error))
    for name, value in measured.items():
        metrics.setdefault(name, value)
    return answer


def _error_of(answer: object) -> str:
    """Why there is no reward, in words; empty where there is one."""
    if not isinstance(answer, Unrewarded):
        return ""
    cause = answer.cause
    return answer.reason if cause is None else f"{cause.type}: {cause.message}"


def _cause_of(failure: BaseException) -> Cause:
    return failure.cause if isinstance(failure, RewardRaisedError) else Cause.of(failure)


class _Clock:
    """The deadline of a call: the batch's, until it begins."""

    def __init__(self, work: Contained[Any], limit_s: float | None, batch: Deadline) -> None:
        self._work, self._limit_s, self._batch = work, limit_s, batch
        self._has_begun = False
        self._deadline = batch
        work.deadline = batch.at

    def begin(self) -> None:
        """It begins; said again, it begins afresh."""
        self._has_begun = True
        self._deadline = Deadline.after(self._limit_s, LIMIT, self._batch)
        self._work.deadline = self._deadline.at

    def over(self, names: _Names, when_late: str, over: Deadline | None) -> Unrewarded:
        """Why the reward is not known, when it is over, or the time `over` was before."""
        deadline = over or self._deadline
        error = deadline.error()
        state = f"had not returned{when_late}" if self._has_begun else "had not been called"
        cause = Cause(type=type(error).__qualname__, message=f"{error}: {names.who} {state}")
        return Unrewarded(
            outcome=Outcome.DEADLINE,
            reason=names.reason,
            source=deadline.source,
            cause=cause,
        )


class RewardWork:
    """Ends a call once nobody wants it, or waits for it.

    Attributes:
        is_group: Whether it rewards a whole group.
        since: When it was asked for, on the loop's clock.
    """

    def __init__(self, call: _Call, work: Contained[Any]) -> None:
        self.is_group, self.since = work.what == GROUP_REWARD, anyio.current_time()
        self._call, self._work = call, work

    def cancel(self) -> None:
        """One of its members is cancelled, or its time is over."""
        if self._call.is_unwanted:
            self._work.cancel()


def _copied(trajectory: Trajectory) -> Trajectory:
    """A copy: what is assigned to its fields, and to those of its segments, is nobody else's."""
    return msgspec.structs.replace(trajectory, segments=list(map(copy.copy, trajectory.segments)))


def _group_of(ended: Sequence[Ended]) -> Group:
    first = ended[0].member
    trajectories = [_copied(each.trajectory) for each in ended]
    return Group.of(first.identity.uid, first.named_prompt, trajectories)


def _end_cancelled(ended: Sequence[Ended]) -> None:
    """Those that were cancelled while they waited for their reward."""
    for _, member, trajectory in ended:
        if member.cancel_reason is not None and trajectory.trainable:
            end_without_reward(trajectory, Outcome.CANCELLED, member.cancel_reason, None, None)
