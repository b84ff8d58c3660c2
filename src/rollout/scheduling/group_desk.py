"""What calls of `collect` and `stream_groups` share: their sources, and what they left."""

from __future__ import annotations

from bisect import insort
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import msgspec

from rollout.agents.identity import Identity
from rollout.scheduling.ended_groups import Ended
from rollout.scheduling.endings import CLOSED
from rollout.scheduling.journal.pulled_before import name_at
from rollout.scheduling.prompt_source import PromptSource
from rollout.scheduling.prompts import check_prompt, trajectory_deadline
from rollout.scheduling.pulled_group import GroupMember, PulledGroup
from rollout.scheduling.trajectory_events import LOST, tell_ended, tell_lost
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.config import RolloutConfig
    from rollout.engine.driver.pool import EnginePool
    from rollout.limits import Deadline
    from rollout.observe.tally import Tally
    from rollout.scheduling.journal.group_log import GroupLog
    from rollout.scheduling.journal.pulled_before import PulledBefore
    from rollout.scheduling.member_runs import MemberRuns
    from rollout.scheduling.rewards.score import Rewarding
    from rollout.scheduling.trajectory import AgentRun
    from rollout.worker_threads import WorkerThreads

    #: Starts a task of the runtime's.
    Start = Callable[..., object]


class GroupCall(Protocol):
    """A call of `collect` or `stream_groups`, as `GroupRun` is."""

    step: int
    taken_names: set[str]

    @property
    def source(self) -> PromptSource:
        """Where its prompts come from."""

    def change(self) -> None:
        """Something is not as it was."""

    def end_with(self, error: BaseException) -> None:
        """It ends with this."""


#: Reasons of carried members that do not continue: the caller wants none; its tokens are too old.
DISCARDED, STALE = "discarded", "stale"


class GroupDesk:
    """Keeps the sources of a runtime where they were left, and what was pulled and not used.

    Args:
        new_runs: Makes what members run in.
        start: Starts a task of the runtime's.

    Attributes:
        runs: What members of groups run in, whichever call has them.
        live: Members that were admitted and have not ended.
        has_groups: See `MemberHome`.
        rewards_groups: Whether groups have a reward.
        events, paused_s: Those of the engines.
    """

    def __init__(
        self,
        config: RolloutConfig,
        engines: EnginePool,
        rewarding: Rewarding,
        threads: WorkerThreads,
        tally: Tally,
        run_seed: int,
        new_runs: Callable[[], MemberRuns],
        start: Start,
        log: GroupLog,
    ) -> None:
        self.runs: MemberRuns
        self.live: dict[GroupMember, None] = {}
        self.has_groups = config.scheduling.samples_per_prompt > 1
        self.events, self.paused_s, self._stop = engines.events, engines.paused_s, engines.stop
        self._changed, self.rewards_groups = anyio.Event(), rewarding.group is not None
        self._config, self._rewarding, self._threads = config, rewarding, threads
        self._tally, self._run_seed = tally, run_seed
        self._new_runs, self._start = new_runs, start
        self._sources: dict[int, PromptSource] = {}
        #: Kept of sources that have given all that they have, and that no call has.
        self._orphans: list[PulledGroup] = []
        self._calls: dict[GroupCall, None] = {}
        self.log = log
        self._numbers = log.pulled
        #: What the journal says that the call which runs had before; it comes first of all.
        self._due: list[PulledGroup] = []
        self._ready: anyio.Event | None = None
        self._is_over = anyio.Event()
        self._has_ended = anyio.Event()

    # Calls.

    def source_of(self, given: Any) -> PromptSource:
        """A caller's source, where it was left; one that is over begins again."""
        for source in tuple(self._sources.values()):
            if source.is_unreachable():
                self.forget(source)
                self._set_free(source)
        known = self._sources.get(id(given))
        if known is None:
            known = PromptSource(given, self._threads, self._pulled)
            self._sources[id(given)] = known
        return known

    def source_for(self, source: PromptSource, step: int) -> tuple[PromptSource, int]:
        """It, and how many groups are missing; one that is over where the journal says so.

        The call of this step was told then that it had ended, or returned without some groups.
        """
        missing = self.log.missing_in(step)
        if self.log.has_ended(step) or missing is not None:
            source = self._over(source.given, is_replayed=True)
        return source, missing or 0

    def _over(self, given: Any, *, is_replayed: bool = False) -> PromptSource:
        source = PromptSource(given, self._threads, self._pulled)
        source.is_over, source.is_replayed = True, is_replayed
        return source

    def forget(self, source: PromptSource) -> None:
        """It will not be asked again: should a caller give the same again, that begins again."""
        if self._sources.get(id(source.given)) is source:  # else it has begun again already
            del self._sources[id(source.given)]
        source.abandon()

    async def open(self, call: GroupCall, serve: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Let a call begin."""
        if self._ready is None:
            self._ready, self.runs = anyio.Event(), self._new_runs()
            self._has_ended = anyio.Event()
            self._start(self._run)
        await self._ready.wait()
        self._restore(call)
        self._calls[call] = None
        self._start(serve)

    def _restore(self, call: GroupCall) -> None:
        """What the journal has for a call of its step is as if it had been pulled."""
        if not self._calls:  # else those may have groups that are not kept here
            self.log.expect_no_lists_before(call.step, {g.source.number for g in self._kept()})
        self._due += map(self._restored, self.log.given_in(call.step))
        if not call.source.is_replayed:
            names = {group.uid for group in (*self._due, *self._kept())}
            self.keep([*map(self._restored, self.log.given_in_none(names))])

    def _restored(self, before: PulledBefore) -> PulledGroup:
        source, pulled = self._over(()), before.entry.pulled or ""
        source.number, source.is_used_up = before.entry.source, before.entry.is_last
        version = before.version
        return PulledGroup(
            before.number, before.prompt, source, version=version, pulled=pulled, before=before
        )

    def left(self, call: GroupCall) -> None:
        """It has ended."""
        self._calls.pop(call, None)
        self._set_free(call.source)

    def _set_free(self, source: PromptSource) -> None:
        """What is kept of a source that does not have it is for the next call, once none has it."""
        if not (source.keeps_its_own or source.users):
            kept, source.kept = source.kept, []
            self.keep(kept)

    def tell(self) -> None:
        """Something is not as it was for all calls, such as the weights' version."""
        for call in tuple(self._calls):
            call.change()

    async def close(self) -> None:
        """End what is kept; no call is left. Shielded by the caller."""
        await self.discard_carried(CLOSED)
        self._is_over.set()
        if self._ready is not None:
            await self._has_ended.wait()

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
            self.tell()

    def _count_lost(self) -> None:
        """Members that nobody concluded, because the tasks that would have were cancelled."""
        for member in self.live:
            member.is_finished = True
        self._tally.outcomes[Outcome.CANCELLED] += len(self.live)
        if self.events.is_on:
            tell_lost(self.events, self.live, LOST)
        self.live.clear()
        for store in self._stores():
            store[:] = [group.fresh() if group.is_carried else group for group in store]
        self._note_change()

    @property
    def is_running(self) -> bool:
        """Whether members run, or could."""
        return self._ready is not None and not self.runs.is_cancelled

    async def _serve(self) -> None:
        assert self._ready is not None
        self._ready.set()
        await self._is_over.wait()

    # Places and prompts.

    async def wait_for_place(self) -> None:
        """Return when a trajectory could run."""
        borrower = object()
        await self.runs.limiter.acquire_on_behalf_of(borrower)
        self.runs.limiter.release_on_behalf_of(borrower)

    def pull(self, source: PromptSource) -> None:
        """Ask a source for one prompt, if it is not being asked."""
        if not source.is_pulling:
            source.is_pulling = True
            pull = partial(self._pull, source)
            source.ask(pull, self._start, self.runs.containment, self._tally)

    async def _pull(self, source: PromptSource) -> None:
        await source.pull()
        self._set_free(source)

    def _pulled(self, given: Any, source: PromptSource) -> PulledGroup | None:
        place = source.count - 1
        check_prompt(given, f"source: prompt {place}")
        if self.log.is_repeated(given, source, place):
            return None
        number, self._numbers = self._numbers, self._numbers + 1
        pulled = name_at(given, place)
        if given.uid is None:  # another name than that: it differs from those of other sources
            given = msgspec.structs.replace(given, uid=f"prompt-{number}")
        return PulledGroup(number, given, source, pulled=pulled)

    def first_kept(self, call: GroupCall) -> PulledGroup | None:
        """What was pulled first of all that a call comes to, taken away.

        None that has a name which the call has taken, and keeps it: it is left for a later one.
        """
        source, taken_names = call.source, call.taken_names
        for group in self._due:
            if group.before is not None and group.before.step == call.step:
                self._due.remove(group)
                return group
        if source.is_replayed:
            return None
        kept = (*self._orphans, *source.kept)
        fitting = [g for g in kept if not (g.is_named and g.uid in taken_names)]
        first = min(fitting, key=attrgetter("number"), default=None)
        for store in (self._orphans, source.kept):
            if first in store:
                store.remove(first)
        return first

    def keep(self, groups: Sequence[PulledGroup]) -> None:
        """Keep these for the next call."""
        for group in groups:
            store = group.source.kept if group.source.keeps_its_own else self._orphans
            insort(store, group, key=attrgetter("number"))

    # Members.

    def prepare(self, group: PulledGroup, call: GroupCall) -> None:
        """Make the members of a group that has none yet, with names of their own."""
        if group.is_begun or group.waiting:
            call.taken_names.add(group.uid)
            return
        uid, count = group.uid, 1
        while group.before is None and group.uid in call.taken_names:
            count += 1
            group.prompt = msgspec.structs.replace(group.prompt, uid=f"{uid}@{count}")
        call.taken_names.add(group.uid)
        step = call.step if group.before is None else group.before.entry.step
        for member in range(self._config.scheduling.samples_per_prompt):
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

    def member_like(self, member: GroupMember) -> GroupMember:
        """Another one in the place of one that failed."""
        return GroupMember(member.prompt, member.identity, group=member.group, log=member.log)

    def trajectory_deadline(self, group: PulledGroup) -> Deadline:
        """Of a member that starts, or continues, now; of two equal ones the outer."""
        return trajectory_deadline(self._config.limits, group.prompt, group.deadline)

    def wants_reward(self, group: PulledGroup, ended: Sequence[Ended]) -> bool:
        """Whether the reward of groups is still to be asked for, of these members."""
        if group.is_rewarded or not self.rewards_groups:
            return False
        return not self.log.is_rewarded(ended)

    async def reward(self, group: PulledGroup, wanted: Sequence[Ended], deadline: Deadline) -> None:
        """Ask for the reward of a group; cancelled meanwhile, it may be asked for again."""
        await self._rewarding.reward_group(wanted, self.runs.containment, deadline)
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
        group.ended_alone(Ended(0, member, trajectory))
        self.log.ended(member, trajectory)
        self._tally.outcomes[trajectory.outcome] += 1
        if self.events.is_on:
            tell_ended(self.events, member, trajectory)
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _stores(self) -> list[list[PulledGroup]]:
        return [self._orphans, *(source.kept for source in self._sources.values())]

    def _kept(self) -> list[PulledGroup]:
        return [group for store in self._stores() for group in store]

    async def hold(self, members: Sequence[GroupMember]) -> None:
        """Have members stop at their next token; returns when they have, or soon."""
        for member in reversed(members):
            group = member.group
            group.running.pop(member, None)
            group.waiting.appendleft(member)
            if not member.is_held:  # else it got no place in the call, and is ending
                self.runs.suspend(member)
        clocks = [member.clock for member in members if member.clock is not None]
        with anyio.move_on_after(self._config.limits.cleanup_s):
            await self._stop(clocks)

    def drop_carried(self, group: PulledGroup) -> None:
        """End the carried members of a group whose prompt begins again."""
        self.runs.cancel([member for member in group.waiting if member.is_held], STALE)

    def cancel(self, uid: str | None, member: int | None, reason: str) -> int:
        """Cancel the carried members that match; they stay in their groups. How many there are."""
        kept = [each for group in self._kept() for each in group.waiting]
        chosen = [each for each in kept if each.is_held and each.is_meant(uid, member)]
        if chosen:
            self.runs.cancel(chosen, reason)
        return len(chosen)

    async def discard_carried(self, reason: str = DISCARDED) -> int:
        """End every carried member, and drop its group; how many there were."""
        groups = [group for group in self._kept() if group.is_carried]
        waiting = (member for group in groups for member in group.waiting)
        carried = [member for member in waiting if member.is_held and not member.is_finished]
        for group in groups if reason == DISCARDED else ():
            self.log.unwanted(group)
        for store in self._stores():
            store[:] = [group for group in store if not group.is_carried]
        if carried:
            self.runs.cancel(carried, reason)
            while not all(member.is_finished for member in carried):
                await self._changed.wait()
        return len(carried)
