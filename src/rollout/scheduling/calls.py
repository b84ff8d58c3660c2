"""One call of a runtime: it admits members, notes their ends, and has complete groups judged.

All four methods of a runtime run a `Call`. What they share is here: the life of a call, admission,
deadlines, ends of members and of groups. `ListCall` (`generate`, `stream`) has the groups of a list
and gives out trajectories; `SourceCall` (`collect`, `stream_groups`) adopts groups while it wants
some, and gives out those that are accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import anyio

from rollout.containment import enter_containment
from rollout.errors import RolloutError
from rollout.limits import Deadline, call_limit
from rollout.scheduling.endings import (
    CLOSED,
    SURPLUS,
    BadEndings,
    explain_cut,
    make_unstarted,
)
from rollout.scheduling.members import GROUP_S, cancel_members
from rollout.scheduling.rewards.score import RewardCall
from rollout.scheduling.selection import Selection
from rollout.scheduling.trajectory_events import emit_ended, emit_group_ended
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping

    from rollout.chat.trajectory import Trajectory
    from rollout.scheduling.groups import Groups
    from rollout.scheduling.members import Member, MemberGroup
    from rollout.scheduling.scheduler import Scheduler

#: The error of calls that were running when the runtime was closed.
CLOSED_MEANWHILE = "the runtime was closed while this call was running"


class Call(ABC):
    """A call of `generate`, `stream`, `collect` or `stream_groups`: see `running`.

    Args:
        name: The method's.
        groups: What the call wants, and has.
        deadline: Its own.

    Attributes:
        number: Of the call, for events.
        began: When it was made, on the loop's clock.
        selection: What it took of what it had run.
        failure: What it ends with; None while all is well.
        is_leaving: Whether its caller leaves it.
        is_ending: Whether it admits nothing more, and ends what is not carried.
        is_closed: Whether it was ended because the runtime is being closed.
        has_ended: Set once only carried members are left of it.
        waits_for_group: Whether members that have ended wait for the others of their group.
    """

    #: Whether its members are those of a list: they count as admitted when the call begins, and
    #: readers of events learn of them when their group has its reward.
    is_list: ClassVar[bool]
    #: The `PromptSource` that groups come from, if there is one.
    source: Any = None
    #: What identifies a `SourceCall` in the journal.
    key: Any = None

    def __init__(
        self,
        scheduler: Scheduler,
        groups: Groups,
        *,
        name: str,
        step: int,
        deadline: Deadline,
    ) -> None:
        self.name, self.step, self.number, self.began = name, step, 0, anyio.current_time()
        self.scheduler, self.groups, self.deadline = scheduler, groups, deadline
        self.waits_for_group = scheduler.group_reward is not None or not self.is_list
        self.selection = Selection()
        self.failure: BaseException | None = None
        self.is_leaving = self.is_ending = self.is_closed = False
        self.has_ended = anyio.Event()
        self._config, self._tally = scheduler.config.scheduling, scheduler.tally
        members = (groups.wanted or 0) * groups.members if self.is_list else None
        self._bad = BadEndings(self._tally, self._config, members)
        self._met_deadline = self._is_cancelled = False
        #: Groups that are complete and not judged; and calls of group rewards.
        self._judging = 0
        self._rewards: dict[MemberGroup, anyio.CancelScope] = {}

    # What the two kinds of calls do differently.

    @property
    def _is_done(self) -> bool:
        """Whether it admits nothing more, and ends: here once its caller leaves it."""
        return self.is_leaving or self.is_closed

    @abstractmethod
    def _begin(self) -> None:
        """Make its groups known, before the call runs."""

    @abstractmethod
    async def _end_members(self) -> None:
        """End members that are not carried to another call, and wait for them."""

    def _adopt_group(self) -> bool:
        """Adopt one more group, if there is one that it wants."""
        return False

    @abstractmethod
    async def _settle_group(self, group: MemberGroup, wanted: Mapping[Member, Trajectory]) -> None:
        """Give out a complete group that is rewarded, or refuse it."""

    def _end_for_failures(self) -> None:
        """End the call because too many members have failed, unless it has all it wants."""
        self._fail(self._bad.make_error())

    # Its life.

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the call during the block; after it only carried members are left of it.

        It runs in a task of the runtime's, so that no scope is open around the caller's block.
        """
        self._begin()
        self.scheduler.add_call(self)
        self.scheduler.start(self._run)
        try:
            yield
        finally:
            self.leave()
            with anyio.CancelScope(shield=True):
                await self.has_ended.wait()
            if self.failure is not None:
                # Where the caller is cancelled, so may be the call's task: no error of its own.
                await anyio.lowlevel.checkpoint_if_cancelled()

    def leave(self) -> None:
        """Note that the caller leaves."""
        self.is_leaving = True
        self.scheduler.change()

    async def _run(self) -> None:
        """Admit members until the call is left or done; then end what is not carried."""
        enter_containment(self.scheduler.services.containment)
        call_limit.set(None)  # where a tool makes this call, its limit is none of the members'
        watching, admitting = anyio.CancelScope(), anyio.CancelScope()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._guard, self._watch_deadline, watching)
                tasks.start_soon(self._guard, self._admit, admitting)
                while not self._is_done:
                    await self.scheduler.wait_change()
                # Not the group's scope: what is in the frames of a task that ends by cancellation
                # lives until a full collection under asyncio, here the call and its trajectories.
                watching.cancel()
                admitting.cancel()
        except anyio.get_cancelled_exc_class():  # with the runtime's tasks
            self.is_closed = True
            self.end_with(RolloutError(CLOSED_MEANWHILE))
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await self._wind_up()
            del self.scheduler.calls[self]
            self.scheduler.change()
            self.has_ended.set()

    async def _guard(
        self, work: Callable[[], Awaitable[object]], scope: anyio.CancelScope | None = None
    ) -> None:
        """Run a task of the call within `scope`; what it raises is what the call ends with."""
        try:
            with scope or anyio.CancelScope():
                await work()
        except (Exception, KeyboardInterrupt) as error:
            self.end_with(error)

    async def _wind_up(self) -> None:
        """Interrupt rewards of groups, and end members."""
        self.is_ending = True
        for scope in self._rewards.values():
            scope.cancel()
        while self._judging:
            await self.scheduler.wait_change()
        await self._end_members()
        self._bad.log()

    async def _wait_members(self) -> None:
        """Wait until no member of the call has a task."""
        while any(member.group.call is self for member in self.scheduler.live):
            await self.scheduler.wait_change()

    # What others see and do.

    def list_unfinished(self) -> dict[Member, bool]:
        """Members without an outcome, and True for those that wait for others of their group."""
        found = dict.fromkeys(self.list_members(), False)
        if self.waits_for_group:
            found |= {member: True for group in self.groups.open for member in group.ended}
        members = sorted(found, key=lambda each: (each.identity.group, each.identity.member))
        return {member: found[member] for member in members}

    def cancel(self, uid: str | None, member: int | None, reason: str) -> int:
        """Cancel the members that match; all of them: nothing further starts either."""
        if uid is None and member is None:
            self._is_cancelled = True
            self.groups.stop()
        members = [*self.list_members(), *self.list_unrewarded()]
        chosen = [each for each in members if each.can_cancel(uid, member)]
        cancel_members(chosen, reason)
        self.scheduler.change()
        return len(chosen)

    def close(self) -> None:
        """End it because the runtime is being closed."""
        self.is_closed = True
        self.end_with(RolloutError(CLOSED_MEANWHILE))
        cancel_members(self.list_members(), CLOSED)

    def end_with(self, error: BaseException) -> None:
        """End the call with this error, whatever it has."""
        self.failure = self.failure or error
        self.groups.stop()
        self.scheduler.change()

    def _fail(self, error: BaseException) -> None:
        """End the call with this error, unless it has all it wants: what else runs is surplus."""
        if not self.groups.has_all:
            self.end_with(error)

    def list_members(self, *, has_slot: bool = False) -> list[Member]:
        """Members without an outcome; or those of them that have a slot."""
        live = [member for member in self.scheduler.live if member.group.call is self]
        running = [each for each in live if not (each.is_finished or each.is_carried)]
        open_groups = () if has_slot else self.groups.open
        return [*running, *(member for group in open_groups for member in group.waiting)]

    def list_unrewarded(self) -> list[Member]:
        """Members that have ended, and whose group is still to get its reward."""
        groups = [group for group in self.groups.open if self._wants_reward(group, group.ended)]
        ended = [each for group in groups for each in group.ended.items()]
        return [member for member, trajectory in ended if trajectory.trainable]

    def _wants_reward(self, group: MemberGroup, ended: Collection[Member]) -> bool:
        """Whether `group_reward` is still to be called for these members."""
        is_open = self.scheduler.group_reward is not None and not group.is_rewarded
        return is_open and not (ended and all(member.was_finished for member in ended))

    # Admission.

    async def _admit(self) -> None:
        """Give slots to members, one after the other, and run them, while the call is open."""
        while True:
            while (member := self.groups.next_member()) is None:
                if not self._adopt_group():
                    await self.scheduler.wait_change()
            recorded = self.scheduler.log.find_trajectory(member)
            if recorded is not None:
                await anyio.lowlevel.checkpoint()
                self._tally.add_calls(recorded.metrics)
                await self.finish_member(member, recorded, is_unstarted=True)
            elif await self.scheduler.take_slot(member):
                self._begin_member(member)
            else:
                await anyio.lowlevel.checkpoint()
                await self._end_waiting(member)

    def _begin_member(self, member: Member) -> None:
        """Start a member that has a slot, or let a carried one continue.

        With the first one the time of its group begins.
        """
        group, group_s = member.group, self.groups.policy.group_s
        if group.deadline is None and group_s is not None:
            paused_s = self.scheduler.engines.paused_s()
            group.deadline = Deadline.after(group_s, GROUP_S).later(-paused_s)
        if member.is_finished:  # it was carried, and ended while it waited here
            self.scheduler.release_slot(member)
            return
        member.batch = self.number
        self.groups.begin(member)
        self._tally.admitted += not (self.is_list or member.is_carried)
        self.scheduler.start_member(member)

    async def _end_waiting(self, member: Member) -> None:
        """End a member that was cancelled, or met a deadline, before it had a slot."""
        if member.group.is_complete or member.is_finished:
            return
        if member.is_carried:  # its agent runs: it ends as others do
            self.groups.begin(member)
            return
        ending = explain_cut(member, member.deadline_met or self.deadline)
        await self.finish_member(member, make_unstarted(member, ending), is_unstarted=True)

    async def _watch_deadline(self) -> None:
        """End what runs when the call's time is over."""
        with anyio.CancelScope(deadline=self.deadline.at):
            await anyio.sleep_forever()
        self._met_deadline = True
        self.groups.stop()
        left = [*self.list_members(), *self.list_unrewarded()]
        cancel_members([m for m in left if m.cancel_reason is None], deadline=self.deadline)
        self.scheduler.change()

    # Ends of members.

    async def finish_member(
        self, member: Member, trajectory: Trajectory, *, is_unstarted: bool = False
    ) -> None:
        """Note the end of a member, and judge its group where that was the last one wanted.

        Args:
            is_unstarted: Its agent does not run: it was cancelled, or is in the journal.
        """
        self._tally.admitted += is_unstarted and not self.is_list
        if self._note_end(member, trajectory):
            if is_unstarted:
                self._start_judging(member.group)
            else:
                await self._judge(member.group, self._complete(member.group))

    def _note_end(self, member: Member, trajectory: Trajectory) -> bool:
        """Count an outcome, and write it to the journal; whether its group is to be judged now."""
        group = member.group
        member.concluding_since = anyio.current_time()
        is_wanted = not group.is_complete
        self.groups.record_end(member, trajectory)
        if group.is_overdue:  # agents that wait for a slot end with those that had one
            agents = [each for each in group.waiting if each.concluding_since is None]
            cancel_members(agents, deadline=group.deadline)
            self.scheduler.change()
        if trajectory.limit_source == self.deadline.source:
            self._met_deadline = True
            if self._config.on_deadline == "drop":
                trajectory.trainable = False
        if is_wanted and self.scheduler.group_reward is None:
            # First: it fails what it cannot write.
            self.scheduler.log.note_ends({member: trajectory})
        self.scheduler.count_end(member, trajectory)
        if not (is_wanted and self.is_list and self.waits_for_group):
            emit_ended(self.scheduler.events, member, trajectory)
        self.selection.note_end(trajectory)
        self._bad.add(trajectory, is_wanted=is_wanted)
        if is_wanted:
            self._check_failures(trajectory)
        return is_wanted and self.groups.can_judge(group)

    def _check_failures(self, trajectory: Trajectory) -> None:
        """End the call where more have failed than may, now that this one has ended."""
        if trajectory.outcome is Outcome.FAILED and self._bad.are_too_many:
            self._end_for_failures()

    # Groups.

    def _start_judging(self, group: MemberGroup) -> None:
        """Judge a complete group in a task of its own: who admits must not wait for rewards."""
        judge = partial(self._judge, group, self._complete(group))
        self.scheduler.start(self._guard, judge)

    def _complete(self, group: MemberGroup) -> dict[Member, Trajectory]:
        """Cancel the members of a complete group that are not wanted; return the wanted ones."""
        wanted = group.choose(self.groups.members)
        cancel_members(self.groups.close_group(group), SURPLUS)
        self._judging += 1
        return wanted

    async def _judge(self, group: MemberGroup, wanted: dict[Member, Trajectory]) -> None:
        """Have a complete group rewarded, and accept, refuse, drop or deliver it.

        It stays open where the call ends before that.
        """
        try:
            if self.groups.is_to_drop(group):
                self.scheduler.log.note_dropped(group)
                policy = self.groups.policy.on_group_deadline
                verdict = "replaced" if policy == "refill" else "dropped"
                self.groups.settle(group, verdict, f"{group.uid!r} met group_s")
                emit_group_ended(self.scheduler.events, wanted, "dropped")
            elif await self._reward(group, wanted):
                await self._settle_group(group, wanted)
            if self.groups.has_refused_too_many:
                self._fail(self.groups.make_refused_error())
        finally:
            self._judging -= 1
            self.scheduler.change()

    async def _reward(self, group: MemberGroup, wanted: dict[Member, Trajectory]) -> bool:
        """Ask for a group's reward, if it needs one; False where the call ends before that."""
        before = {member: each.outcome for member, each in group.ended.items()}
        function = self.scheduler.group_reward
        if function is not None and self._wants_reward(group, wanted):
            if self.is_ending:
                return False
            with anyio.CancelScope() as scope:
                self._rewards[group] = scope
                try:
                    await RewardCall(self.scheduler.services, function, wanted).run()
                finally:
                    del self._rewards[group]
            if scope.cancelled_caught:
                return False
        if not group.is_rewarded:
            group.is_rewarded = True
            self.selection.note_rewards(wanted.values())
        if function is not None:
            self.scheduler.log.note_ends(group.ended)  # it fails those that it cannot write
        for member, trajectory in group.ended.items():
            if trajectory.outcome is not before[member]:
                self._tally.outcomes[before[member]] -= 1
                self._tally.outcomes[trajectory.outcome] += 1
                self._bad.add(trajectory, is_new=False)
                self._check_failures(trajectory)
        return True
