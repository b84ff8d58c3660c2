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
from rollout.scheduling.endings import CLOSED, BadEndings, explain_cut, make_unstarted
from rollout.scheduling.member_group import GROUP_S, Ended, Stage, cancel_members
from rollout.scheduling.trajectory_events import emit_group_ended
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
        surplus_reason: Of members that still run when the call ends.
    """

    name = ""
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
        self.step, self.batch, self.began = step, 0, anyio.current_time()
        self.groups, self.scheduler, self.deadline = groups, scheduler, deadline
        self.failure: BaseException | None = None
        self.is_closed = False
        self._config, self._log = scheduler.config.scheduling, scheduler.log
        self._events, self._tally = scheduler.events, scheduler.tally
        self._bad = BadEndings(self._tally, self._config, count)
        self._group_s = group_s
        self._met_deadline = self._is_cancelled = self._is_leaving = self._ends_rewards = False
        #: Groups that are complete and not judged; and calls of group rewards.
        self._judging = 0
        self._rewards: dict[MemberGroup, anyio.CancelScope] = {}
        #: Members that readers of events are told of with the rewards of their group.
        self._untold: dict[Member, Trajectory] | None = None
        self._has_ended = anyio.Event()

    # Its life.

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the call during the block; after it only carried members are left of it.

        It runs in a task of the runtime's, so that no scope is open around the caller's block.
        """
        self.scheduler.add_call(self)
        self.scheduler.start(self._run)
        try:
            yield
        finally:
            self._is_leaving = True
            self.scheduler.change()
            with anyio.CancelScope(shield=True):
                await self._has_ended.wait()

    async def _run(self) -> None:
        """Admit members until the call is left or done; then end what is not carried."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._guard, self._watch_deadlines)
                tasks.start_soon(self._guard, self._admit)
                while not self._is_done:
                    await self.scheduler.wait_change()
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
            await self.scheduler.wait_change()
        left = self.groups.take_leftovers(may_carry=not self.is_closed)
        cancel_members(left.surplus, self.surplus_reason)
        await self._leave(left)
        self._bad.log()

    async def _leave(self, left: Leftovers) -> None:
        """Wait for members that end; calls of groups leave the rest to the next call."""
        while self._has_tasks:
            await self.scheduler.wait_change()

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
        if self._waits_for_groups:
            found |= {each.member: True for group in self.groups.open for each in group.ended}
        members = sorted(found, key=lambda each: (each.identity.group, each.identity.member))
        return {member: found[member] for member in members}

    @property
    def _waits_for_groups(self) -> bool:
        """Whether a member that has ended waits for its group."""
        return True

    def cancel(self, uid: str | None, member: int | None, reason: str) -> int:
        """Cancel the members that match; all of them: nothing further starts either."""
        if uid is None and member is None:
            self._is_cancelled = True
            self.groups.stop()
        members = [*self._list_members(), *self._list_unrewarded()]
        chosen = [each for each in members if each.can_cancel(uid, member)]
        cancel_members(chosen, reason)
        self.scheduler.change()
        return len(chosen)

    def close(self) -> None:
        """End it because the runtime is being closed."""
        self.is_closed = True
        self.end_with(RolloutError(CLOSED_MEANWHILE))
        cancel_members(self._list_members(), CLOSED)

    def end_with(self, error: BaseException) -> None:
        """End the call with this error, whatever it has."""
        self.failure = self.failure or error
        self.groups.stop()
        self.scheduler.change()

    def _list_running(self) -> list[Member]:
        """Members that have a slot here and no outcome."""
        live = (member for member in self.scheduler.live if member.group.call is self)
        return [each for each in live if not (each.is_finished or each.is_carried)]

    def _list_members(self) -> list[Member]:
        waiting = (member for group in self.groups.open for member in group.waiting)
        return [*self._list_running(), *waiting]

    def _list_unrewarded(self) -> list[Member]:
        """Members that have ended, and whose group is still to get its reward."""
        groups = [group for group in self.groups.open if self._wants_reward(group, group.ended)]
        ended = (each for group in groups for each in group.ended)
        return [each.member for each in ended if each.trajectory.trainable]

    def _wants_reward(self, group: MemberGroup, ended: Sequence[Ended]) -> bool:
        """Whether `group_reward` is still to be called for these members."""
        is_open = self.scheduler.rewards_groups and group.stage < Stage.REWARDED
        return is_open and not (ended and all(each.member.was_finished for each in ended))

    # Admission.

    async def _admit(self) -> None:
        """Give slots to members, one after the other, and run them, while the call is open."""
        while True:
            member = await self._find_next_member()
            recorded = self._log.find_trajectory(member)
            if recorded is not None:
                await anyio.lowlevel.checkpoint()
                member.refills = self.groups.wanted.refills
                self._tally.add_calls(recorded.metrics)
                await self._finish_unstarted(member, recorded)
            elif await self.scheduler.take_slot(member):
                self._begin(member)
            else:
                await anyio.lowlevel.checkpoint()
                if member.group.is_complete or member.is_finished:
                    continue
                if member.is_carried:  # its agent runs: it was cancelled, and ends as others do
                    self.groups.begin(member)
                    continue
                ending = explain_cut(member, member.deadline_met or self.deadline)
                await self._finish_unstarted(member, make_unstarted(member, ending))

    async def _find_next_member(self) -> Member:
        while (member := self.groups.next_member()) is None:
            await self.scheduler.wait_change()
        return member

    def _begin(self, member: Member) -> None:
        """Start a member that has a slot, or let a carried one continue."""
        group = member.group
        if group.deadline is None and self._group_s is not None:
            group.deadline = Deadline.after(self._group_s, GROUP_S)
            group.paused_s = self.scheduler.engines.paused_s()
            self.scheduler.change()  # for `_watch_deadlines`
        if member.is_finished:  # it was carried, and ended while it waited here
            self.scheduler.release_slot(member)
            return
        member.batch = self.batch
        self.groups.begin(member)
        if not member.is_carried:
            self._note_admitted()
        self.scheduler.run_member(member)

    def _note_admitted(self) -> None:
        """Count a member as admitted, where that was not done for all at once."""

    async def _finish_unstarted(self, member: Member, trajectory: Trajectory) -> None:
        """End a member whose agent does not run: it was cancelled, or is in the journal."""
        self._note_admitted()
        if self._note_end(member, trajectory):
            self._start_judging(member.group)
        await self._deliver_alone(member, trajectory)

    async def _watch_deadlines(self) -> None:
        """End what runs when the call's time is over, and the agents of a group at its own."""
        pause_s = 0.0
        while (now := anyio.current_time()) < self.deadline.at:
            first = math.inf
            for group in self.groups.open if self._group_s is not None else ():
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
                await self.scheduler.wait_change()
            pause_s = LEAST_WAIT_S if scope.cancelled_caught else 0.0
        self._met_deadline = True
        self.groups.stop()
        left = [*self._list_members(), *self._list_unrewarded()]
        cancel_members([m for m in left if m.cancel_reason is None], deadline=self.deadline)
        self.scheduler.change()

    # Ends of members.

    async def finish_member(self, member: Member, trajectory: Trajectory) -> None:
        """Note the end of a member, and judge its group where that was the last one wanted."""
        if self._note_end(member, trajectory):
            await self._judge(member.group, self._complete(member.group))
        await self._deliver_alone(member, trajectory)

    def _note_end(self, member: Member, trajectory: Trajectory) -> bool:
        """Count an outcome, and write it to the journal; whether its group is to be judged now."""
        group, ended = member.group, Ended(member, trajectory)
        member.concluding_since = anyio.current_time()
        is_surplus, again = group.is_complete, self.groups.record_end(ended)
        is_wanted = not is_surplus and again is None
        if trajectory.limit_source == self.deadline.source:
            self._met_deadline = True
            if self._config.on_deadline == "drop":
                trajectory.trainable = False
        if is_wanted and not self.scheduler.rewards_groups:
            self._log.note_ends([ended])  # first: it fails what it cannot write
        self.scheduler.count_end(member, trajectory)
        if is_wanted and self._untold is not None:
            self._untold[member] = trajectory
        else:
            self.scheduler.tell_end(member, trajectory)
        self._count(trajectory, is_wanted=is_wanted)
        return is_wanted and self.groups.can_judge(group)

    def _count(self, trajectory: Trajectory, *, is_wanted: bool) -> None:
        """Note a trajectory in the counts of the call, which ends where too many have failed.

        Args:
            is_wanted: Whether it may be taken, and counts for `scheduling.max_failures`: it is no
                surplus, and not restarted.
        """
        self._bad.add(trajectory, is_wanted=is_wanted)
        if is_wanted:
            self._check_failures(trajectory)

    def _check_failures(self, trajectory: Trajectory) -> None:
        """Fail where more have failed than may, now that this one has ended."""
        if trajectory.outcome is Outcome.FAILED and self._bad.are_too_many:
            self._fail(self._bad.make_error())

    def _fail(self, error: BaseException) -> None:
        """Have the call end with this error."""
        raise NotImplementedError

    async def _deliver_alone(self, member: Member, trajectory: Trajectory) -> None:
        """Deliver a trajectory that does not wait for its group."""

    # Groups.

    def _start_judging(self, group: MemberGroup) -> None:
        """Judge a complete group in a task of its own: who admits must not wait for rewards."""
        judge = partial(self._judge, group, self._complete(group))
        self.scheduler.start(partial(self._guard, judge))

    def _complete(self, group: MemberGroup) -> Sequence[Ended]:
        """Cancel the members of a complete group that are not wanted; return the wanted ones."""
        wanted = group.choose(self.groups.wanted.members)
        cancel_members(self.groups.complete(group), SURPLUS)
        self._judging += 1
        return wanted

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
            self.scheduler.change()

    async def _reward(self, group: MemberGroup, wanted: Sequence[Ended]) -> bool:
        """Ask for a group's reward, if it needs one; False where the call ends before that."""
        before = [each.trajectory.outcome for each in group.ended]
        if self._wants_reward(group, wanted):
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
        if group.stage < Stage.REWARDED:
            group.stage = Stage.REWARDED
            self._note_rewards(wanted)
        if self.scheduler.rewards_groups:
            self._log.note_ends(group.ended)  # it fails those that it cannot write
        for outcome, (_, trajectory) in zip(before, group.ended, strict=True):
            if outcome is not trajectory.outcome:
                self._tally.outcomes[outcome] -= 1
                self._tally.outcomes[trajectory.outcome] += 1
                self._bad.add(trajectory, is_new=False)
                self._check_failures(trajectory)
        return True

    def _note_rewards(self, wanted: Sequence[Ended]) -> None:
        """These have the reward of their group, if there is any."""

    async def _hand_over(self, group: MemberGroup, wanted: Sequence[Ended]) -> None:
        """Deliver a group that has its rewards, or refuse it."""
        raise NotImplementedError

    def _emit_group_ended(self, wanted: Sequence[Ended], verdict: str = "") -> None:
        if self._events.is_on:
            emit_group_ended(self._events, wanted, verdict)
