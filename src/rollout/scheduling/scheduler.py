"""What the calls of a runtime share: slots, sources, leftovers, and members that outlive calls."""

from __future__ import annotations

from bisect import insort
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import msgspec

from rollout.agents.identity import Identity, named
from rollout.scheduling.endings import CLOSED
from rollout.scheduling.member_group import GroupMember, MemberGroup
from rollout.scheduling.member_runs import MemberRuns
from rollout.scheduling.prompts import Ended, check_prompt, trajectory_deadline
from rollout.scheduling.sources import PromptSource
from rollout.scheduling.trajectory_events import LOST, tell_ended, tell_lost
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.config import RolloutConfig
    from rollout.limits import Deadline
    from rollout.scheduling.recorded import RecordedGroup
    from rollout.scheduling.run_log import RunLog
    from rollout.scheduling.trajectory import AgentRun, TrajectoryRunner
    from rollout.worker_threads import WorkerThreads

#: Reasons of carried members that do not continue: the caller wants none; its tokens are too old.
DISCARDED, STALE = "discarded", "stale"
#: Sources whose position is known; of more, the one used longest ago is closed.
MAX_SOURCES = 16


class GroupCall(Protocol):
    """A call of `collect` or `stream_groups`, as the scheduler sees it."""

    step: int
    is_replayed: bool
    source: PromptSource
    taken_names: set[str]
    runs: MemberRuns

    def change(self) -> None:
        """Have the tasks that wait for a change of this call look again."""

    def end_with(self, error: BaseException) -> None:
        """End the call with this error, whatever it has."""

    async def serve(self) -> None:
        """Admit members until the call is left."""


class OpenCalls(dict[Any, None]):
    """The calls that run; closing the runtime ends them."""

    def __init__(self) -> None:
        super().__init__()
        self._is_closing = False
        self._idle = anyio.Event()

    @contextmanager
    def running(self, call: Any) -> Iterator[None]:
        """Count a call as running during the block; while calls are closed, it ends at once."""
        self[call] = None
        if self._is_closing:
            call.close()
        try:
            yield
        finally:
            del self[call]
            if not self:
                self._idle.set()

    async def close(self) -> None:
        """End the calls, which are other tasks', and wait until none is left."""
        self._is_closing = True
        while self:
            self._idle = anyio.Event()
            for call in tuple(self):
                call.close()
            await self._idle.wait()


class Scheduler:
    """What the calls of one runtime share.

    Args:
        limiter: Bounds the trajectories in flight.
        start: Starts a task of the runtime's.

    Attributes:
        runs: The members of all calls of groups: carried ones outlive the call that started them.
        live: Members of groups that were admitted and have not ended.
        calls: Those that are open.
        leftovers: Groups that were pulled and not used, in the order in which they were; the next
            call takes them first, whatever its source is.
        log: The journal.
        has_groups: See `MemberHome`.
        rewards_groups: Whether groups have a reward.
    """

    def __init__(
        self,
        config: RolloutConfig,
        runner: TrajectoryRunner,
        threads: WorkerThreads,
        run_seed: int,
        limiter: anyio.CapacityLimiter,
        start: Callable[..., object],
        log: RunLog,
    ) -> None:
        services = runner.services
        self.config, self.engines = config, services.engines
        self.events, self.tally = services.events, services.tally
        self.containment = services.containment
        self.rewarding, self.log = runner.rewarding, log
        self.rewards_groups = runner.rewarding.group is not None
        self.has_groups = config.scheduling.samples_per_prompt > 1
        self.runs: MemberRuns
        self.live: dict[GroupMember, None] = {}
        self.leftovers: list[MemberGroup] = []
        self.calls = OpenCalls()
        self._runner, self._limiter = runner, limiter
        self._threads, self._run_seed, self._start = threads, run_seed, start
        self._pulled = log.pull_count
        self._sources: dict[int, PromptSource] = {}
        self._calls: dict[GroupCall, None] = {}
        #: What the journal says that the calls which run had before; they take it first of all.
        self._given_before: list[MemberGroup] = []
        self._changed = anyio.Event()
        self._ready: anyio.Event | None = None
        self._is_over, self._has_ended = anyio.Event(), anyio.Event()

    def new_runs(self) -> MemberRuns:
        """Tasks of members, of a call of their own."""
        return MemberRuns(self._runner, self._limiter, self.tally)

    # Calls of groups.

    async def open(self, call: GroupCall) -> None:
        """Let a call begin; `call.serve` runs in a task of the runtime's."""
        if self._ready is None:
            self._ready, self.runs = anyio.Event(), self.new_runs()
            self._has_ended = anyio.Event()
            self._start(self._run)
        await self._ready.wait()
        call.runs = self.runs
        self._restore(call)
        self._calls[call] = call.source.users[call] = None
        self._start(call.serve)

    def leave(self, call: GroupCall) -> None:
        """A call has ended."""
        self._calls.pop(call, None)
        call.source.users.pop(call, None)
        self._release(call.source)

    def notify(self) -> None:
        """Something has changed for all calls, such as the weights' version."""
        for call in tuple(self._calls):
            call.change()

    async def close(self) -> None:
        """End what is carried; no call is left. Shielded by the caller."""
        await self.discard_carried(CLOSED)
        self._is_over.set()
        if self._ready is not None:
            await self._has_ended.wait()

    @property
    def is_running(self) -> bool:
        """Whether members run, or could."""
        return self._ready is not None and not self.runs.is_cancelled

    async def _run(self) -> None:
        try:
            await self.runs.run(self._serve)
        except (Exception, KeyboardInterrupt) as error:  # of an agent's: its call's caller gets it
            for call in tuple(self._calls):
                call.end_with(error)
        finally:
            self._count_lost()
            self._ready = None
            self._has_ended.set()
            self.notify()

    async def _serve(self) -> None:
        assert self._ready is not None
        self._ready.set()
        await self._is_over.wait()

    def _count_lost(self) -> None:
        """Count members whose tasks were cancelled with the runtime's."""
        for member in self.live:
            member.is_finished = True
        self.count_lost(self.live)
        self.live.clear()
        groups = self.leftovers
        groups[:] = [group.restart() if group.is_carried else group for group in groups]
        self._note_change()

    def count_lost(self, members: Iterable[GroupMember]) -> None:
        """Count members whose tasks were cancelled: nobody gets their trajectories."""
        lost = list(members)
        self.tally.outcomes[Outcome.CANCELLED] += len(lost)
        if self.events.is_on:
            tell_lost(self.events, lost, LOST)

    # Sources and leftovers.

    def find_source(self, given: Any) -> PromptSource:
        """Return a caller's source where it was left; one that is over begins again."""
        source = self._sources.pop(id(given), None) or self._new_source(given)
        self._sources[id(given)] = source  # the last of them
        idle = [each for each in self._sources.values() if not (each.users or each.is_asked)]
        for each in idle[: max(0, len(self._sources) - MAX_SOURCES)]:
            if each is not source:
                self.forget(each)
        return source

    def _new_source(self, given: Any) -> PromptSource:
        return PromptSource(given, self._threads, self._read, self._note_pull)

    def forget(self, source: PromptSource) -> None:
        """Close a source and forget its position: given again, it begins again."""
        if self._sources.get(id(source.given)) is source:  # else it has begun again already
            del self._sources[id(source.given)]
        source.close()

    async def wait_for_slot(self) -> None:
        """Return when a trajectory could run."""
        borrower = object()
        await self._limiter.acquire_on_behalf_of(borrower)
        self._limiter.release_on_behalf_of(borrower)

    def ask(self, source: PromptSource, step: int) -> None:
        """Ask a source for one prompt, if it is not being asked.

        Args:
            step: Of the call that wants it.
        """
        if not source.is_asked:
            source.step = step
            source.ask(self._start, self.containment, self.tally)

    def _note_pull(self, source: PromptSource) -> None:
        self._release(source)
        for call in tuple(source.users):
            call.change()

    def _release(self, source: PromptSource) -> None:
        """Leave what was pulled and no call took to the next call, once no call has the source."""
        if not source.users:
            self.keep(source.pulled)
            source.pulled.clear()

    def _read(self, prompt: Any, source: PromptSource) -> MemberGroup | None:
        number, where = self._pulled, f"source: prompt {source.count - 1}"
        check_prompt(prompt, where)
        if not self.log.note_pull(number, prompt, source.step, where):
            return None
        self._pulled += 1
        return MemberGroup(number, named(prompt, f"prompt-{number}"), source)

    def _restore(self, call: GroupCall) -> None:
        """Queue the groups that the journal has for a call of this step."""
        self._given_before += map(self._restored, self.log.take_delivered(call.step))
        self.keep([*map(self._restored, self.log.take_left(call.step))])

    def _restored(self, before: RecordedGroup) -> MemberGroup:
        source = self._new_source(())
        source.is_over = True
        if before.call is None:  # no member of it began
            prompt = named(before.prompt, f"prompt-{before.number}")
            return MemberGroup(before.number, prompt, source)
        version = before.version
        return MemberGroup(before.number, before.prompt, source, version=version, before=before)

    def next_group(self, call: GroupCall) -> MemberGroup | None:
        """Take the group that was pulled first, of all that a call may have.

        One with a uid of its own that the call has already is left for a later call.
        """
        for group in self._given_before:
            if group.before is not None and group.before.delivered_in == call.step:
                self._given_before.remove(group)
                return group
        if call.is_replayed:
            return None
        for store in (self.leftovers, call.source.pulled):  # what is left was pulled before
            for group in store:
                if not (group.is_named and group.uid in call.taken_names):
                    store.remove(group)
                    return group
        return None

    def keep(self, groups: Iterable[MemberGroup]) -> None:
        """Queue groups for the next call, in the order in which they were pulled."""
        for group in groups:
            insort(self.leftovers, group, key=attrgetter("number"))

    # Members of groups.

    def name_members(self, group: MemberGroup, call: GroupCall) -> None:
        """Make the members of a group that has none yet, with a uid that is new in the call."""
        if group.is_begun or group.waiting:
            call.taken_names.add(group.uid)
            return
        uid, count = group.uid, 1
        while group.before is None and group.uid in call.taken_names:
            count += 1
            group.prompt = msgspec.structs.replace(group.prompt, uid=f"{uid}@{count}")
        call.taken_names.add(group.uid)
        step = call.step if group.before is None else group.before.step
        for member in range(self.config.scheduling.samples_per_prompt):
            identity = Identity(
                uid=group.uid,
                group=group.number,
                member=member,
                step=step,
                run_seed=self._run_seed,
                validate=False,
            )
            group.waiting.append(GroupMember(group.prompt, identity, group=group))
        self.log.enrol(group)

    def replace_member(self, member: GroupMember) -> GroupMember:
        """Make a member in place of one that failed."""
        return GroupMember(member.prompt, member.identity, group=member.group, log=member.log)

    def trajectory_deadline(self, group: MemberGroup, outer: Deadline | None) -> Deadline:
        """The deadline of a member that starts, or continues, now; of two equal ones the outer."""
        return trajectory_deadline(self.config.limits, group.prompt, outer)

    def wants_reward(self, group: MemberGroup, ended: Sequence[Ended]) -> bool:
        """Whether `group_reward` is still to be called for these members."""
        if group.is_rewarded or not self.rewards_groups:
            return False
        return not self.log.is_rewarded(ended)

    async def reward(self, group: MemberGroup, ended: Sequence[Ended], deadline: Deadline) -> None:
        """Have a group rewarded; cancelled meanwhile, that may be repeated."""
        await self.rewarding.reward_group(ended, self.containment, deadline)
        group.is_rewarded = True

    async def end(self, run: AgentRun, trajectory: Trajectory) -> None:
        """See `MemberHome`."""
        member = run.member
        assert isinstance(member, GroupMember)
        group = member.group
        if group.call is not None:
            await group.call.end(run, trajectory)
            return
        member.is_finished = True
        self.live.pop(member, None)
        group.end_alone(Ended(0, member, trajectory))
        self.log.note_end(member, trajectory)
        self.tally.outcomes[trajectory.outcome] += 1
        if self.events.is_on:
            tell_ended(self.events, member, trajectory)
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # Carried members.

    @property
    def carried(self) -> list[GroupMember]:
        """Carried members whose group no call has."""
        return [each for each in self.live if each.is_held and each.group.call is None]

    async def suspend(self, members: Sequence[GroupMember]) -> None:
        """Carry members: cut off their requests, and wait for that, for `cleanup_s` at most."""
        for member in reversed(members):
            member.group.running.pop(member, None)
            member.group.waiting.insert(0, member)
            if not member.is_held:  # else it was carried before, got no slot here, and is ending
                self.runs.suspend(member)
        clocks = [member.clock for member in members if member.clock is not None]
        with anyio.move_on_after(self.config.limits.cleanup_s):
            await self.engines.stop(clocks)

    def drop_carried(self, group: MemberGroup) -> None:
        """End the carried members of a group whose prompt begins again."""
        self.runs.cancel([member for member in group.waiting if member.is_held], STALE)

    def cancel(self, uid: str | None, member: int | None, reason: str) -> int:
        """Cancel the carried members that match; they stay in their groups. How many there are."""
        waiting = [each for group in self.leftovers for each in group.waiting]
        chosen = [each for each in waiting if each.is_held and each.is_meant(uid, member)]
        if chosen:
            self.runs.cancel(chosen, reason)
        return len(chosen)

    async def discard_carried(self, reason: str = DISCARDED) -> int:
        """End every carried member, and drop its group; how many there were."""
        groups = [group for group in self.leftovers if group.is_carried]
        waiting = (member for group in groups for member in group.waiting)
        carried = [member for member in waiting if member.is_held and not member.is_finished]
        for group in groups if reason == DISCARDED else ():
            self.log.note_dropped(group)
        self.leftovers[:] = [group for group in self.leftovers if not group.is_carried]
        if carried:
            self.runs.cancel(carried, reason)
            while not all(member.is_finished for member in carried):
                await self._changed.wait()
        return len(carried)
