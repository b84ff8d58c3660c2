"""The members that run: admitted as places come free, run, concluded, and handed to their call.

`generate`, `stream`, `collect` and `stream_groups` all run their members here. What differs between
them is a `MemberSource`: which member comes next, and what becomes of one that has ended.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol, TypeVar

import anyio

from rollout.bridge import cancel_scope
from rollout.scheduling.agent_run import AgentRun, MemberHome
from rollout.scopes import leaf_of
from rollout.supervision import open_supervision

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from anyio.abc import TaskGroup

    from rollout.limits import Deadline
    from rollout.observe.tally import Tally
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.scheduling.prompts import Cancellable, Member
    from rollout.scheduling.trajectory_runner import TrajectoryRunner
    from rollout.supervision import Supervision
    from rollout.wake_budget import WakeBudget

M = TypeVar("M", bound="Member")

#: To end a member that was never started takes this share of what one wake-up sets off.
UNSTARTED = 1 / 16

#: Reason of trajectories that were cancelled because the runtime was closed.
CLOSED = "closed"
#: Error of calls that were.
CLOSED_MEANWHILE = "the runtime was closed while this call was running"


class MemberSource(Protocol[M]):
    """Where the members of a call come from."""

    async def next_member(self) -> M | None:
        """The next one to be admitted, once there is one; None: there will be none."""

    def waits_until(self, member: M) -> float:
        """Clock time until which it may wait for a place."""

    def begin(self, member: M) -> AgentRun | None:
        """It has a place: its first attempt; None where it runs already, and may now continue."""

    async def end_unstarted(self, member: M) -> None:
        """It got no place in time, or was cancelled before."""


class MemberRuns:
    """Members with a place, under the runtime's limit on trajectories in flight.

    A member's task exists only while it holds a place, so a batch of any size costs the memory
    of `scheduling.max_in_flight` trajectories plus its results. It is the agent's; once that has
    ended, another one concludes the trajectory. They start one in a round of the
    loop, in their order; where many end because somebody cancels them, `wakes` says how many do in
    a round.

    Attributes:
        limiter: Members take their place from it.
        supervision: Sees that foreign code ends; while `run` runs.
        is_cancelled: Whether the caller of `run` was cancelled: nobody takes trajectories any more.
    """

    def __init__(
        self,
        runner: TrajectoryRunner,
        limiter: anyio.CapacityLimiter,
        tally: Tally,
        wakes: WakeBudget,
    ) -> None:
        self.limiter = limiter
        self.supervision: Supervision
        self.is_cancelled = False
        self._runner = runner
        self._tally = tally
        self._wakes = wakes
        self._tasks: TaskGroup | None = None
        self._concluding: TaskGroup | None = None
        self._ended = anyio.Event()
        self._shield = anyio.CancelScope(shield=True)
        self._admission = anyio.CancelScope()
        self._agents = 0  # that run; the supervision has them
        #: Scopes of what concludes trajectories, and of other such work.
        self._running: dict[Cancellable, None] = {}
        self._has_left = anyio.Event()
        self._conclude_run: Callable[[AgentRun], None]

    def cancel(self, members: Iterable[Member], reason: str) -> None:
        """Cancel members, also those that have not started.

        Where they are many, those that run are reached one after the other.
        """
        chosen = list(members)
        for member in chosen:
            member.cancel_reason = reason
        self.end(chosen)

    def end(self, members: Iterable[Member]) -> None:
        """End what runs of these members, or waits for a place."""
        scopes = deque(s for m in members for s in (m.scope, m.door) if s is not None)
        while scopes and not self._wakes.is_spent:
            self._wakes.spend()
            scopes.popleft().cancel()
        if scopes and self._tasks is not None:
            self._tasks.start_soon(self._end_all, scopes)

    async def run(self, admit: Callable[[], Awaitable[object]]) -> None:
        """Run `admit`, and the members that are started meanwhile, to their end.

        Cancellation ends every member, bounded, and passes through.
        """
        error: BaseException | None = None
        self._conclude_run = self._conclude_soon  # one for all runs
        try:
            async with (
                open_supervision(self._runner.cleanup_s) as self.supervision,
                anyio.create_task_group() as self._tasks,
            ):
                self._tasks.start_soon(self._run_members, admit)
                await self._until_ended()
        except BaseExceptionGroup as group:
            error = leaf_of(group)
            error.__cause__ = error.__cause__ or group
        finally:
            self._tasks = None
            del self._conclude_run  # it refers to us, and only the collector would end that
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and only the collector would end that

    async def admit(self, source: MemberSource[M]) -> None:
        """Give the members of a call places, one after the other, and run them."""
        while (member := await source.next_member()) is not None:
            if await self._take_place(member, source.waits_until(member)):
                self._tally.running += 1
                run = source.begin(member)
                if run is not None:
                    self._start(run)
            else:
                await self._wakes.take(UNSTARTED)
                await source.end_unstarted(member)

    def new_run(self, member: Member, home: MemberHome, deadline: Deadline) -> AgentRun:
        """The first attempt at a member; `deadline` is the outermost of its call."""
        return AgentRun(self.supervision, member, home, deadline, self._conclude_run)

    async def take_wake(self, share: float) -> None:
        """Wait until this round of the loop has room for so much of what a wake-up sets off."""
        await self._wakes.take(share)

    def give_back(self, member: Member) -> None:
        """It has its place no more."""
        self._tally.running -= 1
        self.limiter.release_on_behalf_of(member)

    def suspend(self, member: Member) -> None:
        """It stays, and makes no further request, without a place."""
        assert member.hold is not None
        member.is_held = True
        member.hold.close()
        self.give_back(member)
        self._tally.carried += 1

    def resume(self, member: Member, deadline: Deadline) -> None:
        """It has a place again, and this deadline."""
        assert member.hold is not None
        member.is_held = False
        member.hold.open(deadline)
        self._tally.carried -= 1

    def conclude_soon(self, work: Callable[[], Awaitable[object]]) -> bool:
        """Do what ends trajectories in a task that `run` waits for; False where it is too late."""
        if self._concluding is None:
            return False
        scope = anyio.CancelScope()
        self._running[scope] = None
        self._concluding.start_soon(self._within, scope, work)
        return True

    async def _within(
        self, scope: anyio.CancelScope, work: Callable[[], Awaitable[object]]
    ) -> None:
        try:
            with scope:
                await work()
        finally:
            del self._running[scope]
            self._note_left()

    async def _until_ended(self) -> None:
        """Wait for the members; the caller's cancellation reaches them through here only."""
        try:
            await self._ended.wait()
        except (anyio.get_cancelled_exc_class(), KeyboardInterrupt):
            self.is_cancelled = True
            self._admission.cancel()  # from here on nothing starts that would not be reached
            with anyio.CancelScope(shield=True):
                agents = [each for each in self.supervision.running if isinstance(each, AgentRun)]
                await self._end_all([*agents, *self._running])
                await self._ended.wait()
            raise
        finally:  # on asyncio a second Task.cancel waits for nothing
            self._shield.shield = False

    async def _end_all(self, scopes: Iterable[Cancellable]) -> None:
        """Cancel these, no more in a round than may be woken."""
        for scope in scopes:
            await self._wakes.take()
            scope.cancel()

    async def _run_members(self, admit: Callable[[], Awaitable[object]]) -> None:
        try:
            with self._shield:
                async with anyio.create_task_group() as self._concluding:
                    with self._admission:
                        await admit()
                    while self._running or self._agents:
                        self._has_left = anyio.Event()
                        await self._has_left.wait()
        finally:
            self._concluding = None
            self._ended.set()

    async def _take_place(self, member: Member, until: float) -> bool:
        """Wait for a place; False where the member was cancelled or the time is over."""
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
        return True

    def _start(self, run: AgentRun) -> None:
        self._agents += 1
        self._runner.start(run)
        if self.is_cancelled:
            run.cancel()

    def _conclude_soon(self, run: AgentRun) -> None:
        """An agent has ended; the rest of its trajectory is for a task of its own."""
        self._agents -= 1
        if self._concluding is None or self.is_cancelled:
            self._runner.note(run)
            if self._concluding is None or run.sandbox is None:
                self._leave(run)
            else:
                scope = cancel_scope()
                self._running[scope] = None
                self._concluding.start_soon(self._close_sandbox, run, run.sandbox, scope)
            return
        scope = cancel_scope()
        self._running[scope] = None
        self._concluding.start_soon(self._conclude, run, scope)

    async def _conclude(self, run: AgentRun, scope: anyio.CancelScope) -> None:
        again: AgentRun | None = None
        try:
            with scope:
                try:
                    trajectory = await self._runner.conclude(run)
                finally:
                    if run.sandbox is not None:
                        await run.sandbox.close()
                if isinstance(trajectory, AgentRun):
                    again = trajectory
                    self._start(again)
                else:
                    run.forget()  # it may be long until somebody takes the trajectory
                    await run.home.end(run, trajectory)
        finally:
            del self._running[scope]
            if again is None:
                self._leave(run)

    async def _close_sandbox(
        self, run: AgentRun, sandbox: TrajectorySandbox, scope: anyio.CancelScope
    ) -> None:
        try:
            await sandbox.close()
        finally:
            del self._running[scope]
            self._leave(run)

    def _leave(self, run: AgentRun) -> None:
        """Give the member's place back: nothing of it can be cancelled any more."""
        run.forget()
        if run.member.is_held:
            self._tally.carried -= 1
        else:
            self.give_back(run.member)
        self._note_left()

    def _note_left(self) -> None:
        if not (self._running or self._agents):
            self._has_left.set()
