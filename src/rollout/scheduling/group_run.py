"""One call of `collect` or `stream_groups`: its groups pulled, run, judged and handed over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from rollout.errors import RolloutError, SourceEnded
from rollout.limits import NEVER
from rollout.scheduling.ended_groups import Ended
from rollout.scheduling.endings import CLOSED
from rollout.scheduling.finished import unstarted
from rollout.scheduling.group_endings import GroupEndings
from rollout.scheduling.group_handover import GroupHandover, made
from rollout.scheduling.group_judging import SURPLUS, GroupJudging
from rollout.scheduling.member_runs import CLOSED_MEANWHILE
from rollout.scheduling.pulled_group import GroupMember, PulledGroup
from rollout.scheduling.selection import Selection
from rollout.scheduling.staleness import HINT_S

if TYPE_CHECKING:
    from rollout.chat.group import Group
    from rollout.chat.trajectory import Trajectory
    from rollout.config import SchedulingConfig
    from rollout.limits import Deadline
    from rollout.observe.tally import Tally
    from rollout.scheduling.group_book import GroupBook
    from rollout.scheduling.group_desk import GroupDesk
    from rollout.scheduling.prompt_source import PromptSource
    from rollout.scheduling.prompts import Member
    from rollout.scheduling.selection import Accept
    from rollout.scheduling.trajectory import AgentRun


class GroupRun:
    """One call: admission from its source, and what becomes of groups that have ended.

    Its members run in the runtime's `MemberRuns`, so that they may outlive it.

    Attributes:
        failure: What the call ends with; None while all is well.
        selection: What it took of what it had run.
        handover: Gives its caller what that takes.
        batch: Number of the call, for events.
        began: When it was made, on the loop's clock.
    """

    def __init__(
        self,
        desk: GroupDesk,
        source: PromptSource,
        book: GroupBook,
        *,
        accept: Accept | None,
        step: int,
        group_s: float | None,
        deadline: Deadline,
        config: SchedulingConfig,
        tally: Tally,
    ) -> None:
        self.failure: BaseException | None = None
        self.selection = Selection(by_group=desk.rewards_groups)
        self.book = book
        self.step, self.batch, self.began = step, 0, anyio.current_time()
        self.taken_names: set[str] = set()
        self._desk, self._source = desk, source
        self.handover = GroupHandover(desk, book, source, step, deadline, self.change)
        self._group_s, self._deadline = group_s, deadline
        self._config, self._tally = config, tally
        self._endings = GroupEndings(deadline, config, tally, desk.events, self.fail)
        self._judging = GroupJudging(
            desk,
            book,
            self._endings,
            accept=accept,
            deadline=deadline,
            fail=self.fail,
            change=self.change,
            rewarded=self.selection.rewarded,
        )
        self._running: dict[GroupMember, None] = {}
        self._at_door: GroupMember | None = None
        self._is_closed = self._met_deadline = self._is_cancelled = False
        self._pause: anyio.CancelScope | None = None
        self._changed = anyio.Event()
        self._is_leaving = anyio.Event()
        self._has_left = anyio.Event()

    async def next_group(self) -> Group | None:
        """The next accepted one; None where there will be none.

        Raises:
            BaseException: What the call ends with.
        """
        while True:
            group = self.book.take()
            if group is not None:
                self.change()
                await self.handover.give([group])
                self.selection.accepted(made(group).trajectories)
                return made(group)
            if self.failure is not None:
                raise self.failure
            if self.book.is_complete:
                if not self._is_leaving.is_set():  # else its caller has left, and is told nothing
                    self.handover.tell_end(is_recorded=not self._is_cancelled)
                return None
            with anyio.move_on_after(HINT_S) as scope:
                await self._changed.wait()
            if scope.cancelled_caught and self.book.waits_for_version:
                self._tally.hint("update_weights", self.book.waiting)

    async def all_groups(self) -> list[PulledGroup]:
        """As many accepted ones as are wanted, or what there is; `failure` says why.

        They are the caller's once they are handed over; see `GroupHandover`.
        """
        while not (self.book.is_complete or self.failure is not None):
            await self._changed.wait()
        self.book.stop()
        taken = self.book.take_all()
        for group in taken:
            self.selection.accepted(made(group).trajectories)
        return taken

    @property
    def source(self) -> PromptSource:
        """Where its prompts come from."""
        return self._source

    def fault(self, groups: int, found: int) -> BaseException | None:
        """What it ends with, having found so many of the groups that were wanted; None: nothing."""
        if self.failure is not None:
            return self.failure
        is_short = found < groups - self.book.counts["dropped"]
        if self._met_deadline and (is_short or self._config.on_deadline == "raise"):
            return self._deadline.error()
        if is_short and self._source.is_over and not self._is_cancelled:
            return SourceEnded(f"the source ended: {found} of {groups} groups")
        return None

    def metrics(self) -> dict[str, float]:
        """See `Selection`."""
        running = [member.tokens for member in self._running]
        return {**self.book.metrics(), **self.selection.metrics(running)}

    async def leave(self) -> None:
        """End the call, and wait until nothing of it runs but what is carried; shielded."""
        self._is_leaving.set()
        with anyio.CancelScope(shield=True):
            await self._has_left.wait()

    def cancel(self, uid: str | None, member: int | None, reason: str) -> int:
        """Cancel the members that match; all of them: nothing further starts either."""
        if uid is None and member is None:
            self._is_cancelled = True
            self.book.stop()
        chosen = [m for m in self._members() if m.is_meant(uid, member)]
        unrewarded = [m for m in self._judging.unrewarded() if m.cancel_reason is None]
        chosen += [m for m in unrewarded if m.is_named(uid, member)]
        self._desk.runs.cancel(chosen, reason)
        self.change()
        return len(chosen)

    def close(self) -> None:
        """End it because the runtime is being closed."""
        self._is_closed = True
        self.end_with(RolloutError(CLOSED_MEANWHILE))
        self._desk.runs.cancel([m for m in self._members() if m.cancel_reason is None], CLOSED)
        self._is_leaving.set()

    def change(self) -> None:
        """Something is not as it was: have everybody look again."""
        self._changed.set()
        self._changed = anyio.Event()
        if self._pause is not None:
            self._pause.cancel()

    def fail(self, error: BaseException) -> None:
        """The call ends with this, unless it has all that it wants: what else runs is surplus."""
        if not self.book.has_all:
            self.end_with(error)

    def end_with(self, error: BaseException) -> None:
        """The call ends with this, whatever it has."""
        self.failure = self.failure or error
        self.book.stop()
        self.change()

    def unfinished(self) -> dict[Member, bool]:
        """Members without an outcome, and True for those that wait for others of their group."""
        ended = {e.member: True for group in self.book.open_groups for e in group.ended}
        return {**dict.fromkeys(self._members(), False), **ended}

    def _members(self) -> list[Member]:
        door = [] if self._at_door is None else [self._at_door]
        waiting = (m for group in self.book.open_groups for m in group.waiting)
        return [*self._running, *door, *waiting]

    # Its life, in a task of the runtime's.

    async def serve(self) -> None:
        """Admit members until the call is left, then leave nothing but what is kept."""
        self._source.users[self.change] = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_deadline)
                tasks.start_soon(self._admit)
                await self._is_leaving.wait()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._leave()
            self._has_left.set()

    async def _admit(self) -> None:
        try:
            await self._desk.runs.admit(self)
        except Exception as error:  # a bug of ours, or what a source raised
            self.end_with(error)

    async def _watch_deadline(self) -> None:
        await anyio.sleep_until(self._deadline.at)
        self._met_deadline = True
        self.book.stop()
        running = [m for m in self._members() if m.cancel_reason is None]
        for member in running:
            member.over = self._deadline
        self._desk.runs.end(running)
        self.change()

    async def _leave(self) -> None:
        member, self._at_door = self._at_door, None
        if member is not None:
            self.book.put_back(member)
        self._judging.end()
        while self._judging.is_under_way:
            await self._changed.wait()
        leaving = self.book.leave(is_over=self._is_closed or not self._desk.is_running)
        self._desk.runs.cancel([m for m in leaving.surplus if not m.is_finished], SURPLUS)
        for group in leaving.kept:
            if not group.is_settled:  # else members that clean up end here: they are waited for
                group.call = None
        await self._desk.hold(leaving.carried)
        for member in leaving.carried:
            self._running.pop(member, None)
            self.selection.cut_off(member.tokens)
        carried = {group: None for group in leaving.kept if group.is_carried}
        self._desk.keep([*carried])  # where they can be cancelled while others clean up here
        while any(member.group.call is self for member in self._desk.live):
            await self._changed.wait()
        rest = [group for group in leaving.kept if group not in carried]
        for group in rest:
            group.call = None
        del self._source.users[self.change]
        self._desk.keep(rest)
        self._endings.log()

    # Where members come from: see `MemberSource`.

    async def next_member(self) -> GroupMember | None:
        """See `MemberSource`."""
        while True:
            self._at_door = self.book.next_member()
            if self._at_door is not None:
                recorded = self._desk.log.recorded(self._at_door)
                if recorded is None:
                    return self._at_door
                await self._ended_before(self._at_door, recorded)
                continue
            if self.book.wants_group and self._adopt_one():
                continue
            self._look_at_source()
            with anyio.CancelScope() as self._pause:
                if self.book.wants_group and self._source.can_be_asked:
                    await self._desk.wait_for_place()
                    if not self._pause.cancel_called:  # else nothing may be as it was
                        self._desk.pull(self._source)
                await anyio.sleep_forever()
            self._pause = None

    def _adopt_one(self) -> bool:
        kept = self._desk.first_kept(self)
        if kept is None:
            return False
        group = self.book.fitting(kept := kept.for_call(self.book.wanted.members))
        if group is not kept:  # its prompt is started over
            self._desk.drop_carried(kept)
        for ended in group.taken_on_by(self):
            self._ended_alone(group, ended)
        self._desk.prepare(group, self)
        if self.book.adopt(group):
            self._judging.judge_soon(group)
        return True

    def _ended_alone(self, group: PulledGroup, ended: Ended) -> None:
        """A member had ended while no call had its group."""
        self.selection.ended(ended.trajectory)
        is_counted = self.book.ended(group, ended)
        group.known += is_counted
        if not is_counted:
            self._restart(ended.member)
        self._endings.take_over(ended.trajectory, is_counted=is_counted)

    def _look_at_source(self) -> None:
        """What it says of its end."""
        source = self._source
        if source.failure is not None and not self.book.has_all:  # else the next call is told
            error, source.failure = source.failure, None
            self.fail(error)
        elif source.is_over and self.book.wants_group and not source.is_pulling:
            self.book.stop_pulling()
            self.change()

    def waits_until(self, member: GroupMember) -> float:
        """See `MemberSource`."""
        own = member.group.deadline
        return self._deadline.at if own is None else min(own.at, self._deadline.at)

    def begin(self, member: GroupMember) -> AgentRun | None:
        """See `MemberSource`."""
        self._at_door = None
        group = member.group
        group.limit(self._group_s, self._desk.paused_s)
        if member.is_finished:  # it was carried, and ended while it waited here
            member.group.at_door = None
            self._desk.runs.give_back(member)
            return None
        self._running[member] = None
        member.batch = self.batch
        self.book.begun(member)
        if member.is_held:
            self._desk.runs.resume(member, self._desk.trajectory_deadline(group))
            return None
        self._tally.admitted += 1
        self._desk.live[member] = None
        run = self._desk.runs.new_run(member, self._desk, NEVER)
        run.deadline_left = self._desk.trajectory_deadline(group)
        return run

    async def end_unstarted(self, member: GroupMember) -> None:
        """See `MemberSource`."""
        self._at_door = None
        group, own = member.group, member.group.deadline
        if group.is_settled or member.is_finished:
            group.at_door = None
            return
        over = self._deadline if own is None or self._deadline.at <= own.at else own
        if member.cancel_reason is None and member.over is None and anyio.current_time() < over.at:
            self.book.put_back(member)  # the runtime let it wait meanwhile
            return
        if member.is_held:  # its agent is to end, and tells what became of it
            self.book.begun(member)
            self._running[member] = None
            if member.cancel_reason is None:
                member.over = over
            self._desk.runs.end([member])
            return
        self._tally.admitted += 1
        await self._ended(Ended(0, member, unstarted(member, over)), may_wait=False)

    async def end(self, run: AgentRun, trajectory: Trajectory) -> None:
        """A member of this call has ended."""
        await self._ended(Ended(0, run.member, trajectory))

    async def _ended_before(self, member: GroupMember, trajectory: Trajectory) -> None:
        """The journal has it whole; it is what it is, and is not started."""
        self._at_door = None
        member.group.refills[member.identity.member] = self.book.wanted.refills
        self._tally.admitted += 1
        self._tally.add_calls(trajectory.metrics)
        await self._ended(Ended(0, member, trajectory), may_wait=False)

    def _restart(self, member: Member) -> None:
        assert isinstance(member, GroupMember)
        self.selection.refilled += 1
        self.book.restart(self._desk.member_like(member))

    async def _ended(self, ended: Ended, *, may_wait: bool = True) -> None:
        member, trajectory = ended.member, ended.trajectory
        assert isinstance(member, GroupMember)
        group = member.group
        member.is_finished = True
        member.concluding_since = anyio.current_time()
        self._running.pop(member, None)
        self._desk.live.pop(member, None)
        is_surplus, is_counted = group.is_settled, self.book.ended(group, ended)
        log = self._desk.log if is_counted and not is_surplus else None  # else it does not count
        self._endings.add(member, trajectory, log, is_surplus=is_surplus, is_again=not is_counted)
        self.selection.ended(trajectory)
        if not is_counted:
            self._restart(member)
        if not group.is_settled and self.book.is_whole(group):
            await self._judging.judge(group, may_wait=may_wait)
        self.change()
