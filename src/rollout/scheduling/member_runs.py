"""The slots and the tasks of members: each runs its agent to a trajectory, which its call gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from rollout.agents.identity import Ending
from rollout.containment import enter_containment
from rollout.scheduling.finished import make_unstarted
from rollout.scheduling.member_group import Ended
from rollout.scheduling.trajectory import TrajectoryRun, run_trajectory
from rollout.scheduling.trajectory_events import emit_ended
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.limits import Deadline
    from rollout.scheduling.member_group import Member
    from rollout.scheduling.run_log import RunLog
    from rollout.scheduling.trajectory import TrajectoryRunner

#: Reason of those that nobody takes, because the call itself was cancelled.
LOST = "call"
LOST_ENDING = Ending(outcome=Outcome.CANCELLED, reason=LOST)


class MemberRuns:
    """Runs the members of all calls of a runtime, under its limit on trajectories in flight.

    A member's task exists only while it holds a slot, or is carried, so a batch of any size costs
    the memory of `scheduling.max_in_flight` trajectories plus its results.

    Args:
        start: Starts a task of the runtime's: carried members outlive the call that started them.
        log: The journal.

    Attributes:
        limiter: Members take their slots from it.
        live: Members that have a task.
    """

    def __init__(
        self,
        runner: TrajectoryRunner,
        limiter: anyio.CapacityLimiter,
        start: Callable[..., object],
        log: RunLog,
    ) -> None:
        self.limiter = limiter
        self.live: dict[Member, None] = {}
        self._runner, self._start, self._log = runner, start, log
        services = runner.services
        self._engines, self._cleanup_s = services.engines, services.config.limits.cleanup_s
        self._events, self._tally = services.events, services.tally
        self._containment = services.containment
        self._changed = anyio.Event()

    # Slots.

    async def take_slot(self, member: Member) -> bool:
        """Wait for a slot; False where the member was cancelled, or its time is over."""
        if member.is_ending:
            return False
        await anyio.lowlevel.checkpoint_if_cancelled()
        try:
            self.limiter.acquire_on_behalf_of_nowait(member)
        except anyio.WouldBlock:
            with anyio.CancelScope() as member.slot_wait:
                await self.limiter.acquire_on_behalf_of(member)
            was_cancelled, member.slot_wait = member.slot_wait.cancelled_caught, None
            if was_cancelled:
                return False
        else:
            await anyio.lowlevel.cancel_shielded_checkpoint()
        if member.is_ending:
            self.limiter.release_on_behalf_of(member)
            return False
        self._tally.running += 1
        return True

    async def wait_for_slot(self) -> None:
        """Return when a trajectory could run."""
        borrower = object()
        await self.limiter.acquire_on_behalf_of(borrower)
        self.limiter.release_on_behalf_of(borrower)

    def release_slot(self, member: Member) -> None:
        """Let another member have its slot."""
        self._tally.running -= 1
        self.limiter.release_on_behalf_of(member)

    # Tasks.

    def start(self, member: Member, deadline: Deadline) -> None:
        """Start a member, which has a slot, with this deadline of its own."""
        self.live[member] = None
        run = TrajectoryRun(self._containment, member, deadline)
        self._start(lambda: self._run_member(run))

    async def _run_member(self, run: TrajectoryRun) -> None:
        """Run a member to its trajectory, have its call take that, and free the slot."""
        member = run.member
        enter_containment(self._containment)
        try:
            trajectory = await run_trajectory(self._runner, run)
            call = member.group.call
            if call is None:
                self._finish_between_calls(member, trajectory)
            else:
                await call.finish_member(member, trajectory)
        except (Exception, KeyboardInterrupt) as error:  # a bug of ours, or Ctrl-C
            self._lose(member, error)
        except BaseException:  # the runtime's tasks are cancelled
            self._lose(member, None)
            raise
        finally:
            del self.live[member]
            if member.is_carried:
                self._tally.carried -= 1
            else:
                self.release_slot(member)
            if member.group.call is not None:
                member.group.call.change()
            self._changed.set()
            self._changed = anyio.Event()

    def _finish_between_calls(self, member: Member, trajectory: Trajectory) -> None:
        """Note the end of a member whose group no call has."""
        member.is_finished = True
        member.group.record_end_between_calls(Ended(0, member, trajectory))
        self._log.note_end(member, trajectory)
        self._tally.outcomes[trajectory.outcome] += 1
        if self._events.is_on:
            emit_ended(self._events, member, trajectory)

    def _lose(self, member: Member, error: BaseException | None) -> None:
        self.count_lost([] if member.is_finished else [member])
        call = member.group.call
        if call is not None:
            call.lose_member(member, error)
        elif error is not None:
            raise error

    def count_lost(self, members: Sequence[Member]) -> None:
        """Count members of which nobody gets a trajectory."""
        self._tally.outcomes[Outcome.CANCELLED] += len(members)
        for member in members:
            member.is_finished = True
            if self._events.is_on:
                emit_ended(self._events, member, make_unstarted(member, LOST_ENDING))

    async def wait_until_finished(self, members: Sequence[Member]) -> None:
        """Wait until these members have their outcomes."""
        while not all(member.is_finished for member in members):
            await self._changed.wait()

    # Carried members.

    async def carry(self, members: Sequence[Member]) -> None:
        """Carry members: they keep their tasks without a slot, and make no further request.

        Requests under way are cut off; that is waited for, for `cleanup_s` at most.
        """
        for member in reversed(members):
            member.group.running.pop(member, None)
            member.group.waiting.insert(0, member)
            if not member.is_carried:  # else it was carried before, got no slot here, and is ending
                member.carry()
                self.release_slot(member)
                self._tally.carried += 1
        clocks = [member.clock for member in members if member.clock is not None]
        with anyio.move_on_after(self._cleanup_s):
            await self._engines.interrupt_carried(clocks)

    def continue_carried(self, member: Member, deadline: Deadline) -> None:
        """Let a carried member, which has a slot again, continue with this deadline."""
        member.continue_carried(deadline)
        self._tally.carried -= 1

    @property
    def carried(self) -> list[Member]:
        """Carried members whose group no call has."""
        return [each for each in self.live if each.is_carried and each.group.call is None]
