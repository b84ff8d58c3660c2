"""One call of a runtime: it admits members, notes their ends, and judges their groups.

All calls go this way. `generate` and `stream` have the groups of a list from the start, and want
all of them (`batch_call.py`); `collect` and `stream_groups` pull groups while they want some
(`group_call.py`).
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio

from rollout.errors import RolloutError
from rollout.limits import Deadline
from rollout.scheduling.endings import CLOSED, BadEndings
from rollout.scheduling.finished import explain_cut, make_unstarted
from rollout.scheduling.member_group import GROUP_S, Ended, Stage, cancel_members
from rollout.scheduling.selection import Selection
from rollout.scheduling.trajectory_events import emit_ended, emit_group_ended
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.scheduling.groups import Groups, Leftovers
    from rollout.scheduling.member_group import Member, MemberGroup
    from rollout.scheduling.scheduler import Scheduler

#: The error of calls that were running when the runtime was closed.
CLOSED_MEANWHILE = "the runtime was closed while this call was running"
#: Reason of members that nobody wants any more.
SURPLUS = "surplus"
#: While engines pause, a group's deadline moves: it is looked at as often at most.
LEAST_WAIT_S = 0.01


class Call:
    """What all calls have in common.

    Args:
        groups: What the call wants, and has.
        deadline: Its own.
        group_s: How long each group may take.
        count: How many members it has; None: as many as it admits.

    Attributes:
        name: The method's.
        batch: Number of the call, for events.
        began: When it was made, on the loop's clock.
        failure: What it ends with; None while all is well.
        is_closed: Whether it was ended because the runtime is being closed.
        waits_for_groups: Whether a member that has ended waits for its group.
        counts_with_group: Whether its outcome is counted only with the rewards of that.
        surplus_reason: Of members that still run when the call ends.
        selection: What it took of what it had run.
    """

    name = ""
    waits_for_groups = True
    counts_with_group = False
    surplus_reason = SURPLUS

    def __init__(
        self,
        scheduler: Scheduler,
        groups: Groups,
        *,
        step: int,
        deadline: Deadline,
        group_s: float | None = None,
        count: int | None = None,
    ) -> None:
        self.step, self.batch = step, 0
        self.began = anyio.current_time()
        self.groups, self.scheduler, self.deadline = groups, scheduler, deadline
        self.failure: BaseException | None = None
        self.is_closed = False
        self.selection = Selection(by_group=scheduler.rewards_groups)
        self._config, self._log = scheduler.config.scheduling, scheduler.log
        self._events, self._tally = scheduler.events, scheduler.tally
        self._bad = BadEndings(self._tally, self._config, count)
        self._group_s = group_s
        self._met_deadline = self._is_cancelled = self._is_leaving = self._ends_rewards = False
        #: Groups that are complete and not judged; and calls of group rewards.
        self._judging = 0
        self._rewards: dict[MemberGroup, anyio.CancelScope] = {}
        self._changed, self._has_ended = anyio.Event(), anyio.Event()

    # Its life.

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the call during the block; after it only carried members are left of it.

        It runs in a task of the runtime's, so that no scope is open around the caller's block.
        """
        self.scheduler.start(self.run)
        try:
            yield
        finally:
            self._is_leaving = True
            self.change()
            with anyio.CancelScope(shield=True):
                await self._has_ended.wait()

    async def run(self) -> None:
        """Admit members until the call is left or done; then end what is not carried."""
        self.scheduler.add_call(self)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._guard, self._watch_deadlines)
                tasks.start_soon(self._guard, self.admit)
                while not self._is_done:
                    await self._changed.wait()
                tasks.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():  # with the runtime's tasks
            self.is_closed = True
            self.end_with(RolloutError(CLOSED_MEANWHILE))
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await self._wind_up()
            self.scheduler.remove_call(self)
            self._has_ended.set()
            self.change()

    @property
    def _is_done(self) -> bool:
        """Whether it admits nothing more, and ends."""
        return self._is_leaving

    async def _guard(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run a task of the call; what it raises is what the call ends with."""
        try:
            await work()
        except (Exception, KeyboardInterrupt) as error:
            self.end_with(error)

    async def _wind_up(self) -> None:
        """Interrupt rewards of groups, end members that are not carried, and wait for them."""
        self._ends_rewards = True
        for scope in self._rewards.values():
            scope.cancel()
        while self._judging:
            await self._changed.wait()
        left = self.groups.take_leftovers(is_over=self.is_closed)
        cancel_members(left.surplus, self.surplus_reason)
        await self._return_groups(left)
        self._bad.log()

    async def _return_groups(self, left: Leftovers) -> None:
        """Wait for members that end, and leave the rest to the next call."""
        while self._has_tasks:
            await self._changed.wait()

    @property
    def _has_tasks(self) -> bool:
        return any(member.group.call is self for member in self.scheduler.live)

    # What others see and do.

    @property
    def group_count(self) -> int:
        """How many groups it wants; 0: as many as its consumer takes."""
        return self.groups.wanted.groups or 0

    def list_unfinished(self) -> dict[Member, bool]:
        """Members without an outcome, and True for those that wait for others of their group."""
        found = dict.fromkeys(self._list_members(), False)
        if self.waits_for_groups:
            found |= {each.member: True for group in self.groups.open for each in group.ended}
        members = sorted(found, key=lambda each: (each.identity.group, each.identity.member))
        return {member: found[member] for member in members}

    def cancel(self, uid: str | None, member: int | None, reason: str) -> int:
        """Cancel the members that match; all of them: nothing further starts either."""
        if uid is None and member is None:
            self._is_cancelled = True
            self.groups.stop()
        members = [*self._list_members(), *self._list_unrewarded()]
        chosen = [each for each in members if each.can_cancel(uid, member)]
        cancel_members(chosen, reason)
        self.change()
        return len(chosen)

    def close(self) -> None:
        """End it because the runtime is being closed."""
        self.is_closed = True
        self.end_with(RolloutError(CLOSED_MEANWHILE))
        cancel_members(self._list_members(), CLOSED)

    def change(self) -> None:
        """Wake the tasks that wait for a change of this call."""
        self._changed.set()
        self._changed = anyio.Event()

    def end_with(self, error: BaseException) -> None:
        """End the call with this error, whatever it has."""
        self.failure = self.failure or error
        self.groups.stop()
        self.change()

    def _list_running(self) -> list[Member]:
        """Members that have a slot here and no outcome."""
        live = (member for member in self.scheduler.live if member.group.call is self)
        return [each for each in live if not (each.is_finished or each.is_carried)]

    def _list_members(self) -> list[Member]:
        waiting = (member for group in self.groups.open for member in group.waiting)
        return [*self._list_running(), *waiting]

    def _list_unrewarded(self) -> list[Member]:
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
        while (member := await self._find_next_member()) is not None:
            recorded = self._log.find_trajectory(member)
            if recorded is not None:
                await self._finish_recorded(member, recorded)
            elif await self.scheduler.take_slot(member):
                self._begin(member)
            else:
                await anyio.lowlevel.checkpoint()
                await self._finish_unstarted(member)

    async def _find_next_member(self) -> Member | None:
        return self.groups.next_member()

    def _begin(self, member: Member) -> None:
        """Start a member that has a slot, or let a carried one continue."""
        group = member.group
        if group.deadline is None and self._group_s is not None:
            group.deadline = Deadline.after(self._group_s, GROUP_S)
            group.paused_s = self.scheduler.engines.paused_s()
            self.change()  # for `_watch_deadlines`
        if member.is_finished:  # it was carried, and ended while it waited here
            self.scheduler.release_slot(member)
            return
        member.batch = self.batch
        self.groups.begin(member)
        if not member.is_carried:
            self._note_admitted(member)
        self.scheduler.run_member(member)

    def _note_admitted(self, member: Member) -> None:
        """Count a member as admitted, where that was not done for all at once."""

    async def _finish_recorded(self, member: Member, trajectory: Trajectory) -> None:
        """End a member with its trajectory from the journal; its agent is not run."""
        await anyio.lowlevel.checkpoint()
        member.refills = self.groups.wanted.refills
        self._note_admitted(member)
        self._tally.add_calls(trajectory.metrics)
        await self.finish_member(member, trajectory, may_wait=False)

    async def _finish_unstarted(self, member: Member) -> None:
        """End a member that was cancelled, or whose time was over, before it got a slot."""
        if member.group.is_complete or member.is_finished:
            return
        if member.is_carried:  # its agent runs: it was cancelled, and ends as others do
            self.groups.begin(member)
            return
        self._note_admitted(member)
        ending = explain_cut(member, member.deadline_met or self.deadline)
        await self.finish_member(member, make_unstarted(member, ending), may_wait=False)

    async def _watch_deadlines(self) -> None:
        """End what runs when the call's time is over, and the agents of a group at its own."""
        pause_s = 0.0
        while (now := anyio.current_time()) < self.deadline.at:
            first = math.inf
            for group in self.groups.open:
                if group.deadline is None:
                    continue
                deadline = group.deadline.later(self.scheduler.engines.paused_s() - group.paused_s)
                if deadline.at > now:
                    first = min(first, deadline.at)
                    continue
                members = [m for m in (*group.running, *group.waiting) if m.deadline_met is None]
                agents = [member for member in members if member.concluding_since is None]
                cancel_members(agents, deadline=deadline)
            until = min(self.deadline.at, max(first, now + pause_s))
            with anyio.CancelScope(deadline=until) as scope:
                await self._changed.wait()
            pause_s = LEAST_WAIT_S if scope.cancelled_caught else 0.0
        self._met_deadline = True
        self.groups.stop()
        left = [*self._list_members(), *self._list_unrewarded()]
        cancel_members([m for m in left if m.cancel_reason is None], deadline=self.deadline)
        self.change()

    # Ends of members.

    async def finish_member(
        self, member: Member, trajectory: Trajectory, *, may_wait: bool = True
    ) -> None:
        """Note the end of a member, and complete its group where that was the last one wanted.

        Args:
            may_wait: Whether its group is judged here; else in a task of its own, as the loop that
                admits members must not wait for rewards.
        """
        group, ended = member.group, Ended(member.row, member, trajectory)
        member.concluding_since = anyio.current_time()
        is_surplus, again = group.is_complete, self.groups.record_end(ended)
        is_wanted = not is_surplus and again is None
        if not (is_wanted and self.counts_with_group):
            self._count(ended, is_wanted=is_wanted, is_again=again is not None)
        if not group.is_complete and self.groups.can_judge(group):
            judge = self._complete(group)
            if may_wait:
                await judge()
            else:
                self.scheduler.start(partial(self._guard, judge))
        await self._deliver_alone(ended)

    def _count(self, ended: Ended, *, is_wanted: bool = True, is_again: bool = False) -> None:
        """Count an outcome, write it to the journal, and emit its event."""
        _, member, trajectory = ended
        member.is_finished = True
        if trajectory.limit_source == self.deadline.source:
            self._met_deadline = True
            if self._config.on_deadline == "drop":
                trajectory.trainable = False
        if is_wanted:
            self._log.note_end(member, trajectory)  # first: it fails what it cannot write
        self._tally.outcomes[trajectory.outcome] += 1
        if self._events.is_on:
            emit_ended(self._events, member, trajectory)
        self._note_end(trajectory, is_wanted=is_wanted, is_again=is_again)

    def _note_end(self, trajectory: Trajectory, *, is_wanted: bool, is_again: bool) -> None:
        """Note a trajectory in the counts of the call.

        Args:
            is_wanted: Whether it may be taken, and counts for `scheduling.max_failures`: it is no
                surplus, and not restarted.
            is_again: Whether its member is restarted.
        """
        self._bad.add(trajectory, is_wanted=is_wanted)
        self.selection.note_end(trajectory)
        self.selection.refilled += is_again
        if is_wanted:
            self._check_failures(trajectory)

    def _check_failures(self, trajectory: Trajectory) -> None:
        """Fail where more have failed than may, now that this one has ended."""
        if trajectory.outcome is Outcome.FAILED and self._bad.are_too_many:
            self._fail(self._bad.make_error())

    def _fail(self, error: BaseException) -> None:
        """Have the call end with this error."""
        raise NotImplementedError

    async def _deliver_alone(self, ended: Ended) -> None:
        """Deliver a trajectory that does not wait for its group."""

    # Groups.

    def _complete(self, group: MemberGroup) -> Callable[[], Awaitable[None]]:
        """Cancel the members of a complete group that are not wanted; return what judges it."""
        wanted = group.choose(self.groups.wanted.members)
        cancel_members(self.groups.complete(group), SURPLUS)
        self._judging += 1
        return partial(self._judge, group, wanted)

    async def _judge(self, group: MemberGroup, wanted: Sequence[Ended]) -> None:
        """Drop a complete group, or have it rewarded and handed over."""
        try:
            if self.groups.is_to_drop(group):
                self._log.note_dropped(group)
                is_replaced = self.groups.wanted.on_group_deadline == "refill"
                verdict = "replaced" if is_replaced else "dropped"
                self.groups.settle(group, verdict, f"{group.uid!r} met group_s")
                self._emit_group_ended(wanted, "dropped")
            elif await self._reward(group, wanted):
                await self._hand_over(group, wanted)
            if self.groups.has_refused_too_many and not self.groups.has_all:
                self.end_with(self.groups.make_refused_error())
        finally:
            self._judging -= 1
            self.change()

    async def _reward(self, group: MemberGroup, wanted: Sequence[Ended]) -> bool:
        """Ask for a group's reward, if it needs one; False where the call ends before that."""
        before = [each.trajectory.outcome for each in group.ended]
        was_rewarded = group.stage >= Stage.REWARDED
        if self.scheduler.wants_reward(group, wanted):
            if self._ends_rewards:
                return False
            with anyio.CancelScope() as scope:
                self._rewards[group] = scope
                try:
                    await self.scheduler.rewarding.reward_group(wanted)
                finally:
                    del self._rewards[group]
            if scope.cancelled_caught:
                return False
        if not was_rewarded:
            group.stage = Stage.REWARDED
            self.selection.note_rewards(each.trajectory for each in wanted)
        self._log.note_rewards(group.ended)  # it fails those that it cannot write
        for outcome, (_, member, trajectory) in zip(before, group.ended, strict=True):
            if outcome is not trajectory.outcome and member.is_finished:
                self._tally.outcomes[outcome] -= 1
                self._tally.outcomes[trajectory.outcome] += 1
                self._bad.add(trajectory, is_new=False)
                self._check_failures(trajectory)
        return True

    async def _hand_over(self, group: MemberGroup, wanted: Sequence[Ended]) -> None:
        """Deliver a group that has its rewards, or refuse it."""
        raise NotImplementedError

    def _emit_group_ended(self, wanted: Sequence[Ended], verdict: str = "") -> None:
        if self._events.is_on:
            emit_group_ended(self._events, wanted, verdict)
