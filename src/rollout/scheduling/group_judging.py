"""What becomes of the groups of a call that are whole: rewarded, then taken or refused."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import anyio

from rollout.chat.group import Group
from rollout.scheduling.endings import describe_ending
from rollout.scheduling.selection import judge
from rollout.scopes import find_propagating

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.limits import Deadline
    from rollout.scheduling.ended_groups import Ended
    from rollout.scheduling.group_book import GroupBook
    from rollout.scheduling.group_desk import GroupDesk
    from rollout.scheduling.group_endings import GroupEndings
    from rollout.scheduling.prompts import Member
    from rollout.scheduling.pulled_group import PulledGroup
    from rollout.scheduling.selection import Accept

#: Reason of members that nobody wants any more.
SURPLUS = "surplus"
#: Different rewards of a refused group that an error lists.
LISTED = 8


class GroupJudging:
    """Judges the groups of one call, each once it is whole.

    A reward that is under way when the call ends is cancelled. Its group stays open then, and is
    left to the next call as `GroupBook.leave` says.

    Args:
        accept: Which groups are taken; None: all.
        deadline: Of the call; no reward is waited for past it.
        fail: Has the call end with an error.
        change: Has everybody look again.
        rewarded: Told of trajectories whose group has its reward, or needs none.
    """

    def __init__(
        self,
        desk: GroupDesk,
        book: GroupBook,
        endings: GroupEndings,
        *,
        accept: Accept | None,
        deadline: Deadline,
        fail: Callable[[BaseException], None],
        change: Callable[[], None],
        rewarded: Callable[[Iterable[Trajectory]], None],
    ) -> None:
        self._desk, self._book, self._endings = desk, book, endings
        self._accept, self._deadline = accept, deadline
        self._fail, self._change, self._rewarded = fail, change, rewarded
        self._under_way = 0
        self._rewards: dict[PulledGroup, anyio.CancelScope] = {}
        self._is_over = False

    @property
    def is_under_way(self) -> bool:
        """Whether any group is being judged."""
        return self._under_way > 0

    def unrewarded(self) -> list[Member]:
        """Members that have ended, and whose reward may still be refused."""
        return [
            each.member
            for group in self._book.open_groups
            if self._desk.wants_reward(group, group.ended)
            for each in group.ended
            if each.trajectory.trainable
        ]

    def end(self) -> None:
        """The call ends: no reward is waited for any more."""
        self._is_over = True
        for scope in self._rewards.values():
            scope.cancel()

    async def judge(self, group: PulledGroup, *, may_wait: bool = True) -> None:
        """It is whole: reward it, and take or refuse it.

        Args:
            may_wait: Whether the reward is waited for here; else a task of its own does, as
                what admits members must not wait for it.
        """
        wanted = self._settle(group)
        if may_wait or not self._desk.wants_reward(group, wanted):
            await self._judge(group, wanted)
        else:
            self._judge_soon(group, wanted)

    def judge_soon(self, group: PulledGroup) -> None:
        """As `judge`, in a task of its own."""
        self._judge_soon(group, self._settle(group))

    def _settle(self, group: PulledGroup) -> list[Ended]:
        """The members that are wanted of it; the others are cancelled."""
        self._under_way += 1
        wanted = group.wanted(self._book.wanted.members)
        surplus = self._book.settle(group)
        self._desk.runs.cancel([m for m in surplus if m.cancel_reason is None], SURPLUS)
        return wanted

    def _judge_soon(self, group: PulledGroup, wanted: Sequence[Ended]) -> None:
        if not self._desk.runs.conclude_soon(partial(self._judge, group, wanted)):
            self._under_way -= 1

    async def _judge(self, group: PulledGroup, wanted: Sequence[Ended]) -> None:
        try:
            if self._book.is_to_drop(group):
                self._desk.log.unwanted(group)
                self._book.drop(group)
                self._endings.judged(wanted, "dropped")
            elif await self._reward(group, wanted):
                await self._until_written(wanted)
                self._decide(group, wanted)
            if self._book.has_refused_too_many:
                self._fail(self._book.refused_error())
        finally:
            self._under_way -= 1
            self._change()

    async def _reward(self, group: PulledGroup, wanted: Sequence[Ended]) -> bool:
        """Whether it has its reward, or needs none; else the call has ended before."""
        outcomes, new = [each.trajectory.outcome for each in group.ended], wanted
        if not self._desk.wants_reward(group, wanted):  # an earlier call may have counted some
            ended = {each.member for each in group.ended[group.known :]}
            new = [each for each in wanted if each.member in ended]
        else:
            if self._is_over:
                return False
            with anyio.CancelScope() as scope:
                self._rewards[group] = scope
                try:
                    await self._desk.reward(group, wanted, self._deadline)
                finally:
                    del self._rewards[group]
            if scope.cancelled_caught:
                return False
        self._desk.log.rewarded(group.ended)  # first: it fails those that it cannot write
        self._endings.changed(outcomes, group.ended)
        self._rewarded(each.trajectory for each in new)
        return True

    async def _until_written(self, wanted: Sequence[Ended]) -> None:
        """Nothing is given out before the journal has it."""
        failure = await self._desk.log.until_written(
            wanted, self._deadline.at, lambda: self._is_over
        )
        if failure is not None:
            self._fail(failure)

    def _decide(self, group: PulledGroup, wanted: Sequence[Ended]) -> None:
        made = Group.of(group.uid, group.prompt, [each.trajectory for each in wanted])
        is_accepted = True if _was_given(wanted) else self._accepts(made)
        if is_accepted is None:
            group.is_unjudged = True
            return
        group.made = made
        if not is_accepted:
            self._desk.log.unwanted(group)
        self._endings.judged(wanted, "accepted" if is_accepted else "refused")
        why = "" if is_accepted else _refusal(self._accept, made)
        self._book.judged(group, is_accepted=is_accepted, why=why)

    def _accepts(self, group: Group) -> bool | None:
        """What `accept` says; None where it does not, or is not asked: its call ends with that."""
        if self._book.has_refused_too_many:  # others ended in the same moment
            return None
        try:
            return judge(self._accept, group)
        except BaseException as error:  # as of an agent: it is its call's alone
            if find_propagating(error) is not None:
                raise
            self._fail(error)
            return None


def _refusal(accept: Accept | None, group: Group) -> str:
    """Say which function refused a group, what its rewards were, and which member failed first."""
    name = getattr(accept, "__name__", type(accept).__name__)
    rewards = Counter(
        "unknown" if each.reward is None else f"{each.reward:g}" for each in group.trajectories
    )
    listed = ", ".join(f"{times} × {reward}" for reward, times in rewards.most_common(LISTED))
    what = f"{group.uid!r}, by {name} with the rewards {listed}"
    lost = [each for each in group.trajectories if not each.trainable]
    failed = [each for each in lost if each.cause is not None] or lost
    return f"{what}; {describe_ending(failed[0])}" if failed else what


def _was_given(wanted: Sequence[Ended]) -> bool:
    """Whether an earlier process gave these to its caller: they are what that took."""
    logs = [each.member.log for each in wanted]
    return bool(logs) and all(log is not None and log.is_taken for log in logs)
