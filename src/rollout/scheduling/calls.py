"""One call of a runtime: it admits members, notes their ends, and gives its caller what it wants.

All four methods are a `Call`. `generate` and `stream` have the groups of a list, want all of them,
and give out trajectories: they have an outbox. `collect` and `stream_groups` have a source, adopt
groups while they want some, and give out those that are accepted; members may outlive the call.
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio

from rollout.chat.trajectory import Group, Trajectory
from rollout.errors import RolloutError, SourceEnded
from rollout.limits import NEVER, Deadline
from rollout.scheduling.endings import (
    CLOSED,
    LOST,
    SURPLUS,
    BadEndings,
    explain_cut,
    make_unstarted,
)
from rollout.scheduling.member_group import GROUP_S, Ended, cancel_members
from rollout.scheduling.run_log import RecordedCall
from rollout.scheduling.selection import Selection, call_accept, describe_refusal
from rollout.scheduling.trajectory_events import emit_group_ended
from rollout.scopes import find_propagating
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from rollout.scheduling.group_queue import PromptSource
    from rollout.scheduling.groups import Groups, Leftovers
    from rollout.scheduling.member_group import Member, MemberGroup
    from rollout.scheduling.outbox import Outbox
    from rollout.scheduling.scheduler import Scheduler
    from rollout.scheduling.selection import Accept

#: The error of calls that were running when the runtime was closed.
CLOSED_MEANWHILE = "the runtime was closed while this call was running"
#: Reason of carried members whose tokens are too old to take.
STALE = "stale"
#: While engines pause, a group's deadline moves: it is looked at as often at most.
LEAST_WAIT_S = 0.01


class Call:
    """A call of `generate`, `stream`, `collect` or `stream_groups`: see `running`.

    Args:
        name: The method's.
        groups: What the call wants, and has.
        deadline: Its own.
        outbox: The members of a list, and where they go when they have ended.
        source: Where further groups come from. A call has either a source or an outbox.
        accept: Which groups of a source are taken; None: all.
        group_s: How long each group may take.
        before: What the journal has of the call.

    Attributes:
        number: Of the call, for events.
        began: When it was made, on the loop's clock.
        taken_names: Uids of groups that it has adopted.
        selection: What it took of what it had run.
        failure: What it ends with; None while all is well.
        is_ending: Whether it admits nothing more, and ends what is not carried.
        is_leaving: Whether its caller leaves it.
        has_ended: Set once only carried members are left of it.
        is_closed: Whether it was ended because the runtime is being closed.
        is_replayed: It returned in an earlier process: what it delivered then is all it has.
        had: Groups that it delivered in earlier processes; until `is_awaited` it pulls no others.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        groups: Groups,
        *,
        name: str,
        step: int,
        deadline: Deadline = NEVER,
        outbox: Outbox | None = None,
        source: PromptSource | None = None,
        accept: Accept | None = None,
        group_s: float | None = None,
        before: RecordedCall | None = None,
    ) -> None:
        self.name, self.step, self.number, self.began = name, step, 0, anyio.current_time()
        self.groups, self.scheduler, self.deadline = groups, scheduler, deadline
        self.source, self._accept, self._group_s = source, accept, group_s
        self.outbox, self._before = outbox, before or RecordedCall([])
        self._config, self._log = scheduler.config.scheduling, scheduler.log
        self._events, self._tally = scheduler.events, scheduler.tally
        count = None if outbox is None else len(outbox.members)
        self._bad = BadEndings(self._tally, self._config, count)
        self.selection = Selection(by_group=scheduler.rewards_groups)
        self.taken_names: set[str] = set()
        self.failure: BaseException | None = None
        self.is_replayed, self.is_closed = self._before.has_returned(groups.wanted.groups), False
        self._met_deadline = self._is_cancelled = self.is_leaving = self.is_ending = False
        #: Whether members wait for the others of their group when they have ended.
        self._is_by_group = source is not None or scheduler.rewards_groups
        #: Groups that are complete and not judged; and calls of group rewards.
        self._judging = 0
        self._rewards: dict[MemberGroup, anyio.CancelScope] = {}
        self.has_ended = anyio.Event()
        self.had = self._before.count_delivered()
        self.is_awaited = not self.had

    # Its life.

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the call during the block; after it only carried members are left of it.

        It runs in a task of the runtime's, so that no scope is open around the caller's block.
        """
        if self.outbox is not None:
            self.outbox.open()
            batch = dict.fromkeys(member.group for member in self.outbox.members)
            for group in sorted(batch, key=lambda group: -group.prompt.priority):
                group.join(self)
                self.groups.adopt(group)
            self._tally.admitted += len(self.outbox.members)
        self.scheduler.queue.restore(self._before.groups)
        self.scheduler.add_call(self)
        self.scheduler.start(self._run)
        try:
            yield
        finally:
            self.is_leaving = True
            if self.outbox is not None:
                self.outbox.close_receiver()  # members wait for it
            self.scheduler.change()
            with anyio.CancelScope(shield=True):
                await self.has_ended.wait()
            if self.failure is not None:
                # Where the caller is cancelled, so may be the call's task: no error of its own.
                await anyio.lowlevel.checkpoint_if_cancelled()

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
            self.has_ended.set()

    @property
    def _is_done(self) -> bool:
        """Whether it admits nothing more, and ends: a source's call once its caller leaves it."""
        if self.outbox is None or (self.is_leaving and not self.is_closed):
            return self.is_leaving
        return self.has_crashed or (self.groups.is_complete and not self.outbox.sending)

    @property
    def has_crashed(self) -> bool:
        """Whether a task raised: what else runs is cancelled, and has no trajectory."""
        return self.failure is not None and not self.is_closed

    async def _guard(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run a task of the call; what it raises is what the call ends with."""
        try:
            await work()
        except (Exception, KeyboardInterrupt) as error:
            self.end_with(error)

    async def _wind_up(self) -> None:
        """Interrupt rewards of groups; end members that are not carried, and wait for them."""
        self.is_ending = True
        for scope in self._rewards.values():
            scope.cancel()
        while self._judging:
            await self.scheduler.wait_change()
        open_groups = tuple(self.groups.open)
        left = self.groups.take_leftovers(may_carry=not self.is_closed)
        cancel_members(left.surplus, SURPLUS if self.outbox is None else LOST)
        rest = await self._carry(left) if self.outbox is None else []
        while any(member.group.call is self for member in self.scheduler.live):
            await self.scheduler.wait_change()
        self.scheduler.queue.keep(rest)
        if self.outbox is not None:
            self._tell_rewarded([each for group in open_groups for each in group.ended])
            self.scheduler.count_lost(self.outbox.members)
            self.outbox.send.close()
        self._bad.log()

    async def _carry(self, left: Leftovers) -> list[MemberGroup]:
        """Leave groups that run to the next call, at once; return the others."""
        for group in left.groups:
            if not group.is_complete:  # else its members end in this call, which waits
                group.call = None
        await self.scheduler.carry(left.carried)
        for member in left.carried:  # their requests were cut off, so that all tokens are here
            self.selection.note_cut_off(member.tokens)
        carried = [each for each in left.groups if each.is_carried]
        self.scheduler.queue.keep(carried)
        return [each for each in left.groups if each not in carried]

    # What others see and do.

    def list_unfinished(self) -> dict[Member, bool]:
        """Members without an outcome, and True for those that wait for others of their group."""
        found = dict.fromkeys(self.list_members(), False)
        if self._is_by_group:
            found |= {each.member: True for group in self.groups.open for each in group.ended}
        members = sorted(found, key=lambda each: (each.identity.group, each.identity.member))
        return {member: found[member] for member in members}

    def cancel(self, uid: str | None, member: int | None, reason: str) -> int:
        """Cancel the members that match; all of them: nothing further starts either."""
        if uid is None and member is None:
            self._is_cancelled = True
            self.groups.stop()
        members = [*self.list_members(), *self._list_unrewarded()]
        chosen = [each for each in members if each.can_cancel(uid, member)]
        cancel_members(chosen, reason)
        self.scheduler.change()
        return len(chosen)

    def close(self) -> None:
        """End it because the runtime is being closed: every member of a list gets its outcome."""
        self.is_closed = True
        self.end_with(RolloutError(CLOSED_MEANWHILE))
        cancel_members(self.list_members(), CLOSED)
        if self.outbox is None:
            self.is_leaving = True
        else:
            cancel_members(self._list_unrewarded(), CLOSED)
            self.outbox.close_receiver()

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

    def _list_unrewarded(self) -> list[Member]:
        """Members that have ended, and whose group is still to get its reward."""
        groups = [group for group in self.groups.open if self._wants_reward(group, group.ended)]
        return [e.member for group in groups for e in group.ended if e.trajectory.trainable]

    def _wants_reward(self, group: MemberGroup, ended: Sequence[Ended]) -> bool:
        """Whether `group_reward` is still to be called for these members."""
        is_open = self.scheduler.rewards_groups and not group.is_rewarded
        return is_open and not (ended and all(each.member.was_finished for each in ended))

    # Admission.

    async def _admit(self) -> None:
        """Give slots to members, one after the other, and run them, while the call is open."""
        if self.source is not None:
            await self._repeat_pulls(self.source)
        while True:
            member = await self._find_next_member()
            recorded = self._log.find_trajectory(member)
            if recorded is not None:
                await anyio.lowlevel.checkpoint()
                member.refills = self.groups.wanted.refills
                self._tally.add_calls(recorded.metrics)
                await self.finish_member(member, recorded, is_unstarted=True)
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
                await self.finish_member(member, make_unstarted(member, ending), is_unstarted=True)

    async def _repeat_pulls(self, source: PromptSource) -> None:
        """Bring the source of a resumed call where it stood then."""
        for _ in range(self._before.pull_count):
            if not source.is_over and source.failure is None:
                source.ask(self.step)
            while source.is_pulling:
                await self.scheduler.wait_change()

    async def _find_next_member(self) -> Member:
        """Wait for a member to be admitted, and adopt groups until there is one."""
        while (member := self.groups.next_member()) is None:
            if self.groups.wants_group and self._adopt_one():
                continue
            self._ask_source()
            await self.scheduler.wait_change()
        return member

    def _adopt_one(self) -> bool:
        """Adopt a group that was pulled before, if there is one."""
        found = self.scheduler.queue.pop_group(self)
        if found is None:
            return False
        group = self.groups.refresh(found)
        if group is not found:  # its prompt begins again
            cancel_members([each for each in found.waiting if each.is_carried], STALE)
        self.scheduler.name_members(group, self.step, self.taken_names)
        group.join(self)
        self.groups.adopt(group)
        between, group.between = group.between, []
        for ended in between:  # their outcomes were counted when they ended
            self._count(ended.trajectory, is_wanted=self.groups.record_end(ended) is None)
        if self.groups.can_judge(group):
            self._start_judging(group)
        return True

    def _ask_source(self) -> None:
        """Ask for a prompt while a slot is free; fail with what was raised, or note the end."""
        source = self.source
        if source is None:
            return
        if source.failure is not None and not self.groups.has_all:  # else the next call fails
            error, source.failure = source.failure, None
            self._fail(error)
        if not self.groups.wants_group or source.is_pulling:
            return
        if source.is_over or (self.is_replayed and not self.groups.open):
            self.groups.stop_pulling()
            self.scheduler.change()
        elif self.scheduler.has_free_slot and self.is_awaited and not self.is_replayed:
            source.ask(self.step)

    def _begin(self, member: Member) -> None:
        """Start a member that has a slot, or let a carried one continue."""
        group = member.group
        if group.deadline is None and self._group_s is not None:
            paused_s = self.scheduler.engines.paused_s()
            group.deadline = Deadline.after(self._group_s, GROUP_S).later(-paused_s)
            self.scheduler.change()  # for `_watch_deadlines`
        if member.is_finished:  # it was carried, and ended while it waited here
            self.scheduler.release_slot(member)
            return
        member.batch = self.number
        self.groups.begin(member)
        # Those of a list were counted all at once.
        self._tally.admitted += self.outbox is None and not member.is_carried
        self.scheduler.run_member(member)

    async def _watch_deadlines(self) -> None:
        """End what runs when the call's time is over, and the agents of a group at its own."""
        pause_s = 0.0
        while (now := anyio.current_time()) < self.deadline.at:
            first = math.inf
            for group in self.groups.open if self._group_s is not None else ():
                if group.deadline is None:
                    continue
                deadline = group.deadline.later(self.scheduler.engines.paused_s())
                if deadline.at > now:
                    first = min(first, deadline.at)
                    continue
                group.deadline_met = deadline
                members = [m for m in (*group.running, *group.waiting) if m.deadline_met is None]
                agents = [member for member in members if member.concluding_since is None]
                cancel_members(agents, deadline=deadline)
            until = min(self.deadline.at, max(first, now + pause_s))
            with anyio.CancelScope(deadline=until) as scope:
                await self.scheduler.wait_change()
            pause_s = LEAST_WAIT_S if scope.cancelled_caught else 0.0
        self._met_deadline = True
        self.groups.stop()
        left = [*self.list_members(), *self._list_unrewarded()]
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
        self._tally.admitted += is_unstarted and self.outbox is None
        if self._note_end(member, trajectory):
            if is_unstarted:
                self._start_judging(member.group)
            else:
                await self._judge(member.group, self._complete(member.group))
        if self.outbox is not None and not self._is_by_group:
            await self.outbox.deliver([Ended(member, trajectory)])

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
        if not (is_wanted and self.outbox is not None and self._is_by_group):
            self.scheduler.tell_end(member, trajectory)  # else `_tell_rewarded` does
        self._count(trajectory, is_wanted=is_wanted)
        return is_wanted and self.groups.can_judge(group)

    def _count(self, trajectory: Trajectory, *, is_wanted: bool) -> None:
        """Note a trajectory in the counts of the call, which ends where too many have failed.

        Args:
            is_wanted: Whether it may be taken, and counts for `scheduling.max_failures`: it is no
                surplus, and not restarted.
        """
        if self.outbox is None:
            self.selection.note_end(trajectory)
        self._bad.add(trajectory, is_wanted=is_wanted)
        if is_wanted:
            self._check_failures(trajectory)

    def _check_failures(self, trajectory: Trajectory) -> None:
        """Fail where more have failed than may, now that this one has ended.

        The members of a list are cancelled and delivered first; `find_error` has the error then.
        """
        if trajectory.outcome is not Outcome.FAILED or not self._bad.are_too_many:
            return
        if self.outbox is None:
            self._fail(self._bad.make_error())
        else:
            self.cancel(None, None, "failure_budget")

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
        """Have a complete group rewarded, and accept, refuse, drop or deliver it.

        It stays open where the call ends before that.
        """
        try:
            if self.groups.is_to_drop(group):
                self._log.note_dropped(group)
                policy = self.groups.wanted.on_group_deadline
                verdict = "replaced" if policy == "refill" else "dropped"
                self.groups.settle(group, verdict, f"{group.uid!r} met group_s")
                emit_group_ended(self._events, wanted, "dropped")
            elif not await self._reward(group, wanted):
                pass
            elif self.outbox is None:
                self._accept_or_refuse(group, wanted)
            else:
                await self._deliver_group(self.outbox, group, wanted)
            if self.groups.has_refused_too_many:
                self._fail(self.groups.make_refused_error())
        finally:
            self._judging -= 1
            self.scheduler.change()

    async def _reward(self, group: MemberGroup, wanted: Sequence[Ended]) -> bool:
        """Ask for a group's reward, if it needs one; False where the call ends before that."""
        before = [each.trajectory.outcome for each in group.ended]
        if self._wants_reward(group, wanted):
            if self.is_ending:
                return False
            with anyio.CancelScope() as scope:
                self._rewards[group] = scope
                try:
                    await self.scheduler.rewarding.reward_group(wanted)
                finally:
                    del self._rewards[group]
            if scope.cancelled_caught:
                return False
        if not group.is_rewarded:
            group.is_rewarded = True
            self.selection.note_rewards(each.trajectory for each in wanted)
        if self.scheduler.rewards_groups:
            self._log.note_ends(group.ended)  # it fails those that it cannot write
        for outcome, (_, trajectory) in zip(before, group.ended, strict=True):
            if outcome is not trajectory.outcome:
                self._tally.outcomes[outcome] -= 1
                self._tally.outcomes[trajectory.outcome] += 1
                self._bad.add(trajectory, is_new=False)
                self._check_failures(trajectory)
        return True

    def _accept_or_refuse(self, group: MemberGroup, wanted: Sequence[Ended]) -> None:
        """Have `accept` judge a group; where it raises, which ends the call, the group is left."""
        trajectories = tuple(each.trajectory for each in wanted)
        result = Group(uid=group.uid, prompt=group.prompt, trajectories=trajectories)
        were_taken = bool(wanted) and all(each.member.was_taken for each in wanted)
        if self.groups.has_refused_too_many and not were_taken:  # by groups of the same moment
            return
        try:
            is_accepted = were_taken or call_accept(self._accept, result)
        except BaseException as error:  # as of an agent: it is its call's alone
            is_own = isinstance(error, GeneratorExit)  # no coroutine is closed in a plain call
            if not is_own and find_propagating(error) is not None:
                raise
            self._fail(error)
            return
        group.result = result
        emit_group_ended(self._events, wanted, "accepted" if is_accepted else "refused")
        if is_accepted:
            self.groups.settle(group, "accepted")
        else:
            self.is_replayed = False
            self._log.note_dropped(group)
            self.groups.settle(group, "refused", describe_refusal(result, self._accept))

    async def _deliver_group(
        self, outbox: Outbox, group: MemberGroup, wanted: Sequence[Ended]
    ) -> None:
        """End a group of a list; deliver its members, where they have waited for each other."""
        self._tell_rewarded(wanted)
        if self._events.tells_all:
            emit_group_ended(self._events, wanted)
        self.groups.settle(group, "delivered")
        group.ended = []  # else members, their groups and trajectories refer to each other
        if self._is_by_group:
            await outbox.deliver(wanted)

    def _tell_rewarded(self, ended: Iterable[Ended]) -> None:
        """Tell readers of events of members whose group has its reward, or will get none."""
        for member, trajectory in ended if self._is_by_group else ():
            self.scheduler.tell_end(member, trajectory)

    # What its caller gets: an outbox, or a `GroupStream`.

    async def receive_batch(self) -> None:
        """Wait until every member of a list has ended; no member has a slot then.

        Raises:
            BaseException: As `find_error` says; every member has been delivered, unless a task of
                the library's own failed.
        """
        assert self.outbox is not None
        await self.has_ended.wait()
        if not self.has_crashed:
            await self.outbox.wait_until_written(self.outbox.members)
        if (error := self.find_error()) is not None:
            raise error

    def find_error(self, found: int = 0) -> BaseException | None:
        """Find the error that the call ends with, if any.

        That is what it failed with, as where the runtime was closed; `SourceEnded`; or a
        `LimitExceeded`, where too many members failed, or its time is over and that is an error.

        Args:
            found: How many groups the caller of `collect` has received.
        """
        unwritten = None if self.outbox is None else self.outbox.unwritten
        if unwritten is not None or self.failure is not None:
            return unwritten or self.failure
        if self.outbox is not None and self._bad.are_too_many:
            return self._bad.make_error()
        source, wanted = self.source, self.groups.wanted.groups or 0
        is_short = source is not None and found < wanted - self.groups.counts["dropped"]
        if self._met_deadline and (is_short or self._config.on_deadline == "raise"):
            return self.deadline.error()
        if is_short and source is not None and source.is_over and not self._is_cancelled:
            return SourceEnded(f"the source ended: {found} of {wanted} groups")
        return None
