"""The tasks of members: each runs its agent to a trajectory, which its call gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from rollout.containment import enter_containment
from rollout.scheduling.trajectory import AgentRun, run_trajectory
from rollout.scopes import unwrap_group

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from anyio.abc import TaskGroup

    from rollout.limits import Deadline
    from rollout.observe.tally import Tally
    from rollout.scheduling.prompts import Member
    from rollout.scheduling.trajectory import MemberHome, TrajectoryRunner

#: The error of calls that were running when the runtime was closed.
CLOSED_MEANWHILE = "the runtime was closed while this call was running"


class MemberRuns:
    """One task group of members, under the runtime's limit on trajectories in flight.

    A member's task exists only while it holds a slot, or is carried, so a batch of any size costs
    the memory of `scheduling.max_in_flight` trajectories plus its results.

    Attributes:
        limiter: Members take their slots from it.
        containment: Has the tasks of foreign code.
        is_cancelled: Whether the caller of `run` was cancelled: no member may start any more.
    """

    def __init__(
        self, runner: TrajectoryRunner, limiter: anyio.CapacityLimiter, tally: Tally
    ) -> None:
        self.limiter, self.containment = limiter, runner.services.containment
        self.is_cancelled = False
        self._runner, self._tally = runner, tally
        self._tasks: TaskGroup | None = None

    async def run(self, admit: Callable[[], Awaitable[object]]) -> None:
        """Run `admit`, and the members that it starts, to their end.

        Cancellation ends every member, bounded, and passes through.
        """
        try:
            async with anyio.create_task_group() as self._tasks:
                try:
                    await admit()
                except anyio.get_cancelled_exc_class():
                    self.is_cancelled = True
                    raise
        except BaseExceptionGroup as group:
            error = unwrap_group(group)
            raise error from error.__cause__ or group
        finally:
            self._tasks = None

    async def take_slot(self, member: Member, until: float) -> bool:
        """Wait for a slot; False where the member was cancelled or the time is over."""
        if member.cancel_reason is not None:
            return False
        await anyio.lowlevel.checkpoint_if_cancelled()
        if anyio.current_time() >= until:
            return False
        try:
            self.limiter.acquire_on_behalf_of_nowait(member)
        except anyio.WouldBlock:
            # Only here: trio remembers scopes with deadlines for long after they have been left.
            with anyio.CancelScope(deadline=until) as member.door:
                await self.limiter.acquire_on_behalf_of(member)
            is_too_late, member.door = member.door.cancelled_caught, None
            if is_too_late:
                return False
        else:
            await anyio.lowlevel.cancel_shielded_checkpoint()
        if member.cancel_reason is not None:
            self.limiter.release_on_behalf_of(member)
            return False
        self._tally.running += 1
        return True

    def start(
        self, member: Member, home: MemberHome, outermost: Deadline, deadline: Deadline | None
    ) -> None:
        """Start the first attempt at a member, which has a slot.

        Args:
            home: Gets its trajectory.
            outermost: What bounds it also while the runtime lets its work wait.
            deadline: Its own; None: as the configuration says.
        """
        assert self._tasks is not None
        run = AgentRun(self.containment, member, home, outermost)
        run.deadline_left = deadline
        self._tasks.start_soon(self._run_member, run)

    def start_soon(self, work: Callable[[], Coroutine[Any, Any, object]]) -> bool:
        """Start another task that `run` waits for; False where it is too late."""
        if self._tasks is None or self.is_cancelled:
            return False
        self._tasks.start_soon(work)
        return True

    def release_slot(self, member: Member) -> None:
        """Let another member have its slot."""
        self._tally.running -= 1
        self.limiter.release_on_behalf_of(member)

    def suspend(self, member: Member) -> None:
        """Carry a member: it keeps its task without a slot, and makes no further request."""
        member.pause()
        self.release_slot(member)
        self._tally.carried += 1

    def resume(self, member: Member, deadline: Deadline) -> None:
        """Let a carried member, which has a slot again, continue with this deadline."""
        member.resume(deadline)
        self._tally.carried -= 1

    def cancel(self, members: Iterable[Member], reason: str) -> None:
        """Cancel members, also those that have not started."""
        chosen = list(members)
        for member in chosen:
            member.cancel_reason = reason
        self.end(chosen)

    def end(self, members: Iterable[Member]) -> None:
        """Cancel the agents and rewards of these members, and their waits for a slot."""
        for member in members:
            for scope in (member.scope, member.door):
                if scope is not None:
                    scope.cancel()

    async def _run_member(self, run: AgentRun) -> None:
        """Run a member to its trajectory, have its call take that, and free the slot."""
        enter_containment(self.containment)
        try:
            trajectory = await run_trajectory(self._runner, run)
            await run.home.end(run, trajectory)
        finally:
            if run.member.is_held:
                self._tally.carried -= 1
            else:
                self.release_slot(run.member)
