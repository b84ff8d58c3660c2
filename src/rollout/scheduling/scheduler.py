"""What the calls of a runtime share: slots, the tasks of members, groups that no call has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from rollout.agents.ending import Ending
from rollout.limits import Clock
from rollout.scheduling.arguments import check_prompt
from rollout.scheduling.endings import CLOSED, LOST, make_unstarted
from rollout.scheduling.members import MemberGroup, cancel_members
from rollout.scheduling.sources import PromptSource
from rollout.scheduling.trajectory import limit_trajectory, run_trajectory
from rollout.scheduling.trajectory_events import emit_ended
from rollout.types import Outcome, name_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.scheduling.admission import Admission
    from rollout.scheduling.members import Member
    from rollout.scheduling.run_log import RunLog
    from rollout.scheduling.trajectory import TrajectoryRunner

#: Reason of carried members that do not continue because the caller wants none.
DISCARDED = "discarded"
#: Sources whose position is known; of more, the one used longest ago is closed.
MAX_SOURCES = 16


class Scheduler:
    """Runs the members of all calls of a runtime, under its limit on trajectories in flight.

    A member's task exists only while it has a slot, or is carried, so a batch of any size costs
    the memory of `scheduling.max_in_flight` trajectories plus its results.

    Args:
        admission: Bounds the trajectories in flight.
        start: Starts a task of the runtime's, with a name: carried members outlive their call.

    Attributes:
        group_reward: The function of groups that have a reward.
        log: The journal.
        calls: Each `Call` that is open; its module imports this one.
        live: Members that have a task.
        unclaimed: Groups that were pulled and that no call has. First those that the journal gives
            back to the call that delivered them, in that order; then the others, as they were
            pulled. The next call takes them first, whatever its source is.
    """

    def __init__(
        self,
        runner: TrajectoryRunner,
        run_seed: int,
        admission: Admission,
        start: Callable[..., object],
        log: RunLog,
    ) -> None:
        services = runner.services
        self.config, self.engines, self.events = services.config, services.engines, services.events
        self.tally, self.threads = services.tally, services.threads
        self.services, self.group_reward = services, runner.group_reward
        self.run_seed, self.start, self.log = run_seed, start, log
        self.calls: dict[Any, None] = {}
        self.live: dict[Member, None] = {}
        self.unclaimed: list[MemberGroup] = []
        self._runner, self._limiter, self._is_closing = runner, admission.limiter, False
        self._changed = anyio.Event()
        admission.on_change = self.change
        self._pull_count = log.pull_count
        self._sources: dict[int, PromptSource] = {}

    def change(self) -> None:
        """Wake what waits for a change: a member or a call ended, a prompt came, a slot is free."""
        self._changed.set()

    async def wait_change(self) -> None:
        """Wait until something has changed since the caller last looked, without awaiting since."""
        if self._changed.is_set():
            self._changed = anyio.Event()
        await self._changed.wait()

    # Calls.

    def add_call(self, call: Any) -> None:
        """Note a call that begins; while the runtime is being closed it ends at once."""
        self.calls[call] = None
        if self._is_closing:
            call.close()

    async def close(self) -> None:
        """End the calls, which are other tasks', and what is carried. Shielded by the caller."""
        self._is_closing = True
        for call in tuple(self.calls):
            call.close()
        while self.calls:
            await self.wait_change()
        await self.discard_carried(CLOSED)
        for source in tuple(self._sources.values()):
            self.forget_source(source)

    # Slots.

    @property
    def has_free_slot(self) -> bool:
        """Whether one more trajectory could run now."""
        return self._limiter.available_tokens > 0

    async def take_slot(self, member: Member) -> bool:
        """Wait for a slot; False where the member was cancelled, or its time is over."""
        if member.is_ending:
            return False
        with anyio.CancelScope() as member.slot_wait:
            await self._limiter.acquire_on_behalf_of(member)
        was_cancelled, member.slot_wait = member.slot_wait.cancelled_caught, None
        if was_cancelled:
            return False
        self.tally.running += 1
        if member.is_ending:
            self.release_slot(member)
        return not member.is_ending

    def release_slot(self, member: Member) -> None:
        """Let another member have its slot."""
        self.tally.running -= 1
        self._limiter.release_on_behalf_of(member)
        self.change()

    # Tasks.

    def start_member(self, member: Member) -> None:
        """Start a member, which has a slot, or let a carried one continue; its time begins now."""
        of_group = member.group.deadline
        if of_group is not None:
            of_group = of_group.later(self.engines.paused_s())
        try:
            deadline = limit_trajectory(self.config.limits, member.prompt, of_group)
        except BaseException:  # the time that its prompt gives it was changed after its check
            self.release_slot(member)
            raise
        if member.is_carried:
            assert member.clock is not None
            member.is_carried = False
            member.clock.continue_carried(deadline)
            self.tally.carried -= 1
            # Its group's time may have been over while it waited: that ends agents, not rewards.
            if member.clock.is_over and member.concluding_since is None:
                cancel_members([member], deadline=deadline)
        else:
            self.live[member] = None
            member.clock = Clock(deadline, self.services.containment.clock)
            self.start(self._run_member, member, name=member.identity.uid)

    async def _run_member(self, member: Member) -> None:
        """Run a member to its trajectory, have its call take that, and free the slot."""
        try:
            trajectory = await run_trajectory(self._runner, member)
            if member.group.call is None:
                self._finish_between_calls(member, trajectory)
            else:
                await member.group.call.finish_member(member, trajectory)
        except BaseException as error:  # a bug of ours, Ctrl-C, or a cancelled runtime
            self.count_lost([member])
            member.group.forget(member)
            if member.group.call is None or not isinstance(error, Exception | KeyboardInterrupt):
                raise
            member.group.call.end_with(error)
        finally:
            del self.live[member]
            if member.is_carried:
                self.tally.carried -= 1
                self.change()
            else:
                self.release_slot(member)

    def _finish_between_calls(self, member: Member, trajectory: Trajectory) -> None:
        """Note the end of a member whose group no call has."""
        member.group.forget(member)
        member.group.ended[member] = trajectory
        if self.group_reward is None:
            self.log.note_ends({member: trajectory})
        self.count_end(member, trajectory)
        emit_ended(self.events, member, trajectory)

    def count_end(self, member: Member, trajectory: Trajectory) -> None:
        """Count the outcome of a member."""
        member.is_finished = True
        self.tally.outcomes[trajectory.outcome] += 1

    def count_lost(self, members: Iterable[Member]) -> None:
        """Count those of the members that have no outcome: nobody gets their trajectories."""
        ending = Ending(outcome=Outcome.CANCELLED, reason=LOST)
        for member in [each for each in members if not each.is_finished]:
            trajectory = make_unstarted(member, ending)
            self.count_end(member, trajectory)
            emit_ended(self.events, member, trajectory)

    # Groups that no call has.

    def keep(self, groups: Iterable[MemberGroup]) -> None:
        """Keep groups for the next call."""
        for group in groups:
            group.call = None
            self.unclaimed.append(group)
        self.unclaimed.sort(key=lambda each: -1 if each.was_delivered else each.number)

    def pop_group(self, call: Any) -> MemberGroup | None:
        """Take the first leftover that a `SourceCall` may have.

        What an open call's source gave is for calls with that source. A group with a uid of its own
        that the call has already is left for a later call. What the call delivered in an earlier
        process is accepted first: another group must not come between.
        """
        others = {each.source for each in self.calls} - {call.source, None}
        keys = {each.key for each in self.calls}
        must_wait = call.is_replayed or any(group.was_delivered for group in call.groups.open)
        for at, group in enumerate(self.unclaimed):
            if group.before is not None and group.was_delivered:
                of = group.before.delivered_in  # which may have ended without it in this process
                is_free = call.wants_more and not must_wait and of not in keys
                may_take = of == call.key or is_free
            else:
                is_named = group.is_begun or group.waiting or group.before is not None
                is_taken = is_named and group.uid in call.taken_names
                may_take = not (must_wait or is_taken or group.source in others)
            if may_take:
                return self.unclaimed.pop(at)
        return None

    # Sources.

    def find_source(self, data: Any) -> PromptSource:
        """Return a caller's source where it was left; one that is over begins again."""
        source = self._sources.pop(id(data), None) or PromptSource(data, self)
        used = {each.source for each in self.calls}
        idle = [each for each in self._sources.values() if not (each in used or each.is_pulling)]
        self._sources[id(data)] = source  # the last of them
        for each in idle[: max(0, len(self._sources) - MAX_SOURCES)]:
            self.forget_source(each)
        return source

    def forget_source(self, source: PromptSource) -> None:
        """Close a source and forget its position: a call that names it again begins it again."""
        if self._sources.get(id(source.data)) is source:  # else it has begun again already
            del self._sources[id(source.data)]
        source.close()

    def add_prompt(self, prompt: Any, source: PromptSource) -> None:
        """Keep the group of a prompt that was pulled, unless the journal has it.

        Raises:
            PromptError: It is none, or cannot be recorded.
        """
        number, where = self._pull_count, f"source: prompt {source.count - 1}"
        check_prompt(prompt, where)
        if self.log.note_pull(number, prompt, source.asked_by, where):
            self._pull_count += 1
            group = MemberGroup(number, name_prompt(prompt, f"prompt-{number}"), source=source)
            self.unclaimed.append(group)

    # Carried members.

    @property
    def carried(self) -> list[Member]:
        """Carried members whose group no call has."""
        return [each for each in self.live if each.is_carried and each.group.call is None]

    async def carry(self, members: Sequence[Member]) -> None:
        """Carry members: they keep their tasks without a slot, and make no further request.

        Their limits stand still. Requests under way are cut off; that is waited for, for
        `cleanup_s` at most.
        """
        for member in reversed(members):
            member.group.forget(member)
            member.group.waiting.insert(0, member)
            if not member.is_carried:  # else it was carried before, got no slot here, and is ending
                assert member.clock is not None
                member.is_carried = True
                member.clock.carry()
                self.release_slot(member)
                self.tally.carried += 1
        clocks = [member.clock for member in members if member.clock is not None]
        with anyio.move_on_after(self.config.limits.cleanup_s):
            await self.engines.interrupt_carried(clocks)

    def cancel(self, uid: str | None, member: int | None, reason: str) -> int:
        """Cancel the carried members that match; they stay in their groups. How many there are."""
        chosen = [each for each in self.carried if each.can_cancel(uid, member)]
        cancel_members(chosen, reason)
        return len(chosen)

    async def discard_carried(self, reason: str = DISCARDED) -> int:
        """End every carried member, and drop its group; how many there were."""
        groups = [group for group in self.unclaimed if group.is_carried]
        for group in groups:
            self.unclaimed.remove(group)
            if reason == DISCARDED:
                self.log.note_dropped(group)
        carried = [member for group in groups for member in group.waiting if member.is_carried]
        cancel_members(carried, reason)
        while not all(member.is_finished for member in carried):
            await self.wait_change()
        return len(carried)
