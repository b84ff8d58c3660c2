"""One call of a runtime: its members admitted, run, and handed over, alone or as groups.

`collect` and `stream_groups` pull groups while they want some (`GroupCall`); `generate` and
`stream` have all groups of a list from the start, and want all of them (`BatchCall`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import anyio

from rollout.errors import RolloutError
from rollout.scheduling.endings import CLOSED, BadEndings, describe_ending
from rollout.scheduling.finished import unstarted
from rollout.scheduling.member_group import GroupMember
from rollout.scheduling.member_runs import CLOSED_MEANWHILE
from rollout.scheduling.prompts import Ended
from rollout.scheduling.selection import judge
from rollout.scheduling.trajectory_events import tell_ended, tell_group_ended
from rollout.scopes import find_propagating

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.chat.group import Group
    from rollout.chat.trajectory import Trajectory
    from rollout.limits import Deadline
    from rollout.scheduling.groups import Groups
    from rollout.scheduling.member_group import MemberGroup
    from rollout.scheduling.member_runs import MemberRuns
    from rollout.scheduling.prompts import Member
    from rollout.scheduling.scheduler import Scheduler
    from rollout.scheduling.selection import Accept
    from rollout.scheduling.trajectory import AgentRun, MemberHome

#: Reason of members that nobody wants any more.
SURPLUS = "surplus"
#: Different rewards of a refused group that an error lists.
LISTED = 8


class Call:
    """What all calls have in common: admission, ends of members, judging of groups.

    Args:
        groups: What the call wants, and has.
        deadline: Its own; no reward is waited for past it.
        accept: Which groups are taken; None: all.
        group_s: How long each group may take.

    Attributes:
        name: The method's.
        runs: The tasks of its members.
        batch: Number of the call, for events.
        began: When it was made, on the loop's clock.
        failure: What it ends with; None while all is well.
        is_closed: Whether it was ended because the runtime is being closed.
        waits_for_groups: Whether a member that has ended waits for its group.
    """

    name = ""
    waits_for_groups = True

    def __init__(
        self,
        scheduler: Scheduler,
        groups: Groups,
        *,
        step: int,
        deadline: Deadline,
        accept: Accept | None = None,
        group_s: float | None = None,
    ) -> None:
        self.step, self.batch = step, 0
        self.began = anyio.current_time()
        self.groups, self.scheduler, self.deadline = groups, scheduler, deadline
        self.failure: BaseException | None = None
        self.runs: MemberRuns
        self._config, self._tally = scheduler.config.scheduling, scheduler.tally
        self._events, self._log = scheduler.events, scheduler.log
        self._accept, self._group_s = accept, group_s
        self._bad = BadEndings(scheduler.tally)
        self._running: dict[GroupMember, None] = {}
        self.is_closed = self._met_deadline = self._is_cancelled = False
        self._judging = 0
        self._rewards: dict[MemberGroup, anyio.CancelScope] = {}
        self._ends_rewards = False

    # What others see and do.

    @property
    def group_count(self) -> int:
        """How many groups it wants; 0: as many as its consumer takes."""
        return self.groups.wanted.groups or 0

    def unfinished(self) -> dict[Member, bool]:
        """Members without an outcome, and True for those that wait for others of their group."""
        ended = {e.member: True for group in self.groups.open for e in group.ended}
        return {**dict.fromkeys(self._members(), False), **ended}

    def cancel(self, uid: str | None, member: int | None, reason: str) -> int:
        """Cancel the members that match; all of them: nothing further starts either."""
        if uid is None and member is None:
            self._is_cancelled = True
            self.groups.stop()
        chosen: list[Member] = [m for m in self._members() if m.is_meant(uid, member)]
        unrewarded = [m for m in self._unrewarded() if m.cancel_reason is None]
        chosen += [m for m in unrewarded if m.is_named(uid, member)]
        self.runs.cancel(chosen, reason)
        self.change()
        return len(chosen)

    def close(self) -> None:
        """End it because the runtime is being closed."""
        self.is_closed = True
        self.end_with(RolloutError(CLOSED_MEANWHILE))
        self.runs.cancel([m for m in self._members() if m.cancel_reason is None], CLOSED)

    def change(self) -> None:
        """Have the tasks that wait for a change of this call look again."""

    def end_with(self, error: BaseException) -> None:
        """End the call with this error, whatever it has."""
        self.failure = self.failure or error
        self.groups.stop()
        self.change()

    def _fail(self, error: BaseException) -> None:
        """End the call with this error, unless it has all it wants: what else runs is surplus."""
        if not self.groups.has_all:
            self.end_with(error)

    def _members(self) -> list[GroupMember]:
        waiting = (m for group in self.groups.open for m in group.waiting)
        return [*self._running, *waiting]

    def _unrewarded(self) -> list[Member]:
        """Members that have ended, and whose group has no reward yet."""
        if not self.scheduler.rewards_groups:
            return []
        return [
            each.member
            for group in self.groups.open
            if self.scheduler.wants_reward(group, group.ended)
            for each in group.ended
            if each.trajectory.trainable
        ]

    # Admission.

    async def admit(self) -> None:
        """Give slots to members, one after the other, and run them, until no more will come."""
        while (member := await self._next_member()) is not None:
            recorded = self._find_recorded(member)
            if recorded is not None:
                await self._end_recorded(member, recorded)
            elif await self.runs.take_slot(member, self._waits_until(member)):
                self._begin(member)
            else:
                await anyio.lowlevel.checkpoint()
                await self._end_unstarted(member)

    async def _next_member(self) -> GroupMember | None:
        return self.groups.next_member()

    def _waits_until(self, member: GroupMember) -> float:
        own = member.group.deadline
        return self.deadline.at if own is None else min(own.at, self.deadline.at)

    def _begin(self, member: GroupMember) -> None:
        """Start a member that has a slot, or let a carried one continue."""
        group = member.group
        group.limit(self._group_s, self.scheduler.engines.paused_s)
        if member.is_finished:  # it was carried, and ended while it waited here
            self.runs.release_slot(member)
            return
        self._running[member] = None
        member.batch = self.batch
        self.groups.begin(member)
        home, outermost = self._home
        outer = group.deadline or (self.deadline if outermost is self.deadline else None)
        deadline = self.scheduler.trajectory_deadline(group, outer)
        if member.is_held:
            self.runs.resume(member, deadline)
        else:
            self._note_admitted(member)
            self.runs.start(member, home, outermost, deadline)

    @property
    def _home(self) -> tuple[MemberHome, Deadline]:
        """Who gets the trajectories, and the deadline that bounds them even while paused."""
        raise NotImplementedError

    def _note_admitted(self, member: GroupMember) -> None:
        """Count a member as admitted, where that was not done for the whole call."""

    def _find_recorded(self, member: GroupMember) -> Trajectory | None:
        """Return a member's trajectory, where the journal has it."""
        return self._log.find_trajectory(member)

    async def _end_recorded(self, member: GroupMember, trajectory: Trajectory) -> None:
        """End a member with its trajectory from the journal; its agent is not run."""
        await anyio.lowlevel.checkpoint()
        member.group.refills[member.identity.member] = self.groups.wanted.refills
        self._note_admitted(member)
        self._tally.add_calls(trajectory.metrics)
        await self._end(Ended(member.row, member, trajectory), may_wait=False)

    async def _end_unstarted(self, member: GroupMember) -> None:
        """End a member that got no slot in time, or was cancelled before."""
        group, own = member.group, member.group.deadline
        if group.is_settled or member.is_finished:
            return
        over = self.deadline if own is None or self.deadline.at <= own.at else own
        if member.cancel_reason is None and member.over is None and anyio.current_time() < over.at:
            return  # a pause has moved its group's deadline meanwhile
        if member.is_held:  # its agent runs: it is cancelled, and ends as others do
            self.groups.begin(member)
            self._running[member] = None
            if member.cancel_reason is None:
                member.over = over
            self.runs.end([member])
            return
        self._note_admitted(member)
        await self._end(Ended(member.row, member, unstarted(member, over)), may_wait=False)

    async def _watch_deadline(self) -> None:
        """End what runs when the call's time is over."""
        await anyio.sleep_until(self.deadline.at)
        self._met_deadline = True
        self.groups.stop()
        running = [m for m in self._members() if m.cancel_reason is None]
        for member in running:
            member.over = self.deadline
        self.runs.end(running)
        self.change()

    # Ends of members.

    async def end(self, run: AgentRun, trajectory: Trajectory) -> None:
        """See `MemberHome`."""
        await self._end(Ended(run.member.row, run.member, trajectory))

    async def _end(self, ended: Ended, *, may_wait: bool = True) -> None:
        """Note the end of a member, and complete its group where that was the last one wanted.

        Args:
            may_wait: Whether the reward of its group is awaited here; else in a task of its own,
                as the loop that admits members must not wait for it.
        """
        member = ended.member
        assert isinstance(member, GroupMember)
        group = member.group
        member.concluding_since = anyio.current_time()
        self._running.pop(member, None)
        self.scheduler.live.pop(member, None)
        is_surplus, is_again = group.is_settled, not self.groups.end(ended)
        self._note_end(ended, is_surplus=is_surplus, is_again=is_again)
        if not group.is_settled and self.groups.is_whole(group):
            await self._complete(group, may_wait=may_wait)
        await self._deliver_alone(ended)
        self.change()

    async def _deliver_alone(self, ended: Ended) -> None:
        """Deliver a trajectory that does not wait for its group."""

    def _note_end(self, ended: Ended, *, is_surplus: bool, is_again: bool) -> None:
        """Count a member that has ended, as this kind of call does.

        Args:
            is_surplus: Whether its group was complete before.
            is_again: Whether it is restarted.
        """
        raise NotImplementedError

    def _count(self, ended: Ended, *, is_surplus: bool = False, is_again: bool = False) -> None:
        """Count an outcome, write it to the journal, and emit its event."""
        _, member, trajectory = ended
        member.is_finished = True
        if trajectory.limit_source == self.deadline.source:
            self._met_deadline = True
            if self._config.on_deadline == "drop":
                trajectory.trainable = False
        is_counted = not (is_surplus or is_again)
        if is_counted:
            self._log.note_end(member, trajectory)  # first: it fails what it cannot write
        self._tally.outcomes[trajectory.outcome] += 1
        self._bad.add(trajectory, is_free=not is_counted)
        if self._events.is_on:
            tell_ended(self._events, member, trajectory)
        if is_counted:
            self._check_failures(trajectory)

    def _check_failures(self, trajectory: Trajectory) -> None:
        """End the call where more have failed than may, now that this one has ended."""
        raise NotImplementedError

    # Groups.

    async def _complete(self, group: MemberGroup, *, may_wait: bool = True) -> None:
        """Cancel the members of a complete group that are not wanted, reward it, and judge it."""
        wanted = group.choose(self.groups.wanted.members)
        surplus = self.groups.settle(group)
        self.runs.cancel([m for m in surplus if m.cancel_reason is None], SURPLUS)
        self._judging += 1
        if may_wait or not self.scheduler.wants_reward(group, wanted):
            await self._judge(group, wanted)
        elif not self.runs.start_soon(lambda: self._judge(group, wanted)):
            self._judging -= 1

    async def _judge(self, group: MemberGroup, wanted: Sequence[Ended]) -> None:
        try:
            if self.groups.is_to_drop(group):
                self._log.note_dropped(group)
                self.groups.drop(group)
                self._tell_group(wanted, "dropped")
            elif await self._reward(group, wanted):
                await self._hand_over(group, wanted)
            if self.groups.has_refused_too_many:
                self._fail(self.groups.refused_error())
        finally:
            self._judging -= 1
            self.change()

    async def _reward(self, group: MemberGroup, wanted: Sequence[Ended]) -> bool:
        """Ask for a group's reward, if it needs one; False where the call ends before that."""
        if self.scheduler.wants_reward(group, wanted):
            if self._ends_rewards:
                return False
            with anyio.CancelScope() as scope:
                self._rewards[group] = scope
                try:
                    await self.scheduler.reward(group, wanted, self.deadline)
                finally:
                    del self._rewards[group]
            if scope.cancelled_caught:
                return False
        self._log.note_rewards(group.ended)  # it fails those that it cannot write
        return True

    def _end_rewards(self) -> None:
        """Cancel the rewards of groups: the call ends."""
        self._ends_rewards = True
        for scope in self._rewards.values():
            scope.cancel()

    async def _hand_over(self, group: MemberGroup, wanted: Sequence[Ended]) -> None:
        """Deliver a group that has its rewards, or refuse it."""
        raise NotImplementedError

    def _accepts(self, group: Group) -> bool | None:
        """What `accept` returns; None where it raises, which ends the call, or is not called."""
        if self.groups.has_refused_too_many:  # by groups that ended in the same moment
            return None
        try:
            return judge(self._accept, group)
        except BaseException as error:  # as of an agent: it is its call's alone
            is_own = isinstance(error, GeneratorExit)  # no coroutine is closed in a plain call
            if not is_own and find_propagating(error) is not None:
                raise
            self._fail(error)
            return None

    def _describe_refusal(self, group: Group) -> str:
        """Say which function refused a group, its rewards, and which member failed first."""
        name = getattr(self._accept, "__name__", type(self._accept).__name__)
        rewards = Counter(
            "unknown" if each.reward is None else f"{each.reward:g}" for each in group.trajectories
        )
        listed = ", ".join(f"{times} × {reward}" for reward, times in rewards.most_common(LISTED))
        what = f"{group.uid!r}, by {name} with the rewards {listed}"
        lost = [each for each in group.trajectories if not each.trainable]
        failed = [each for each in lost if each.cause is not None] or lost
        return f"{what}; {describe_ending(failed[0])}" if failed else what

    def _tell_group(self, wanted: Sequence[Ended], verdict: str = "") -> None:
        if self._events.is_on:
            tell_group_ended(self._events, wanted, verdict)
