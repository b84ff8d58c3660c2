"""One call of `generate` or `stream`: its members admitted, run and delivered."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio
import msgspec

from rollout.agents.identity import Ending
from rollout.errors import LimitExceeded, RolloutError
from rollout.scheduling.agent_run import AgentRun
from rollout.scheduling.endings import LISTED_CAUSES, BadEndings
from rollout.scheduling.finished import ended_before_start
from rollout.scopes import leaf_of
from rollout.supervision import open_supervision
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from anyio.abc import TaskGroup

    from rollout.chat.trajectory import Trajectory
    from rollout.config import SchedulingConfig
    from rollout.limits import Deadline
    from rollout.observe.tally import Tally
    from rollout.scheduling.journal.trajectory_log import TrajectoryLog
    from rollout.scheduling.prompts import Cancellable, Member
    from rollout.scheduling.trajectory_runner import TrajectoryRunner
    from rollout.supervision import Supervision
    from rollout.wake_budget import WakeBudget

    #: Takes a finished trajectory and its row; may wait, and holds the trajectory's place.
    Deliver = Callable[[int, Trajectory], Awaitable[None]]

#: Reason of trajectories that were cancelled because the runtime was closed.
CLOSED = "closed"
#: To end a member that was never started takes this share of what one wake-up sets off.
UNSTARTED = 1 / 16
#: The batch's deadline ends so many members at once, and the next ones so many seconds later.
TOGETHER, STAGGER_S = 32, 0.003


class BatchRun:
    """Members of one call, run under the runtime's limit on trajectories in flight.

    A member's task exists only while it holds a place, so a batch of any size costs the memory
    of `scheduling.max_in_flight` trajectories plus its results. It is the agent's; once that has
    ended, another one concludes the trajectory. They start one in a round of the
    loop, in their order; where many end because somebody cancels them, `wakes` says how many do in
    a round.
    """

    def __init__(
        self,
        *,
        members: Sequence[Member],
        runner: TrajectoryRunner,
        limiter: anyio.CapacityLimiter,
        deadline: Deadline,
        config: SchedulingConfig,
        tally: Tally,
        wakes: WakeBudget,
    ) -> None:
        self.members = members
        self._runner = runner
        self._limiter = limiter
        self._deadline = deadline
        self._config = config
        self._tally = tally
        self._wakes = wakes
        self._deliver: Deliver
        self._tasks: TaskGroup | None = None
        self._concluding: TaskGroup | None = None
        self._ended = anyio.Event()
        self._shield = anyio.CancelScope(shield=True)
        self._admission = anyio.CancelScope()
        #: Agents that run, and the scopes of what concludes trajectories.
        self._running: dict[Cancellable, None] = {}
        self._has_left = anyio.Event()
        self._started = 0
        self._last_deadline = deadline
        self._bad = BadEndings()
        self._met_deadline = False
        self._is_closed = self._is_cancelled = False
        #: Rows whose end could not be written to the journal; they are not delivered.
        self.unwritten: list[tuple[int, Trajectory]] = []
        self._unwritten_error: RolloutError | None = None

    def cancel(self, uid: str | None, member: int | None, reason: str) -> int:
        """Cancel the members that match, also those not started yet; how many there were.

        Where they are many, those that run are reached one after the other.
        """
        chosen = [
            m
            for m in self.members
            if uid in (None, m.identity.uid)
            and member in (None, m.identity.member)
            and not m.is_finished
            and m.cancel_reason is None
        ]
        for m in chosen:
            m.cancel_reason = reason
        scopes = deque(m.scope for m in chosen if m.scope is not None)
        while scopes and not self._wakes.is_spent:
            self._wakes.spend()
            scopes.popleft().cancel()
        if scopes and self._tasks is not None:
            self._tasks.start_soon(self._end_all, scopes)
        return len(chosen)

    def close(self) -> None:
        """Cancel every member, because the runtime is being closed; they are delivered as usual."""
        self._is_closed = True
        self.cancel(None, None, CLOSED)

    async def run(self, deliver: Deliver) -> None:
        """Run every member and deliver each trajectory once.

        Cancellation ends every member, bounded, and passes through.

        Raises:
            LimitExceeded: More members failed than `scheduling.max_failures` allows, or the time
                was over and `scheduling.on_deadline` is "raise"; every member has been delivered.
            RolloutError: `close` was called; every member has been delivered.
        """
        self._tally.admitted += len(self.members)
        self._deliver = deliver
        error: BaseException | None = None
        try:
            async with (
                open_supervision(self._runner.cleanup_s) as supervision,
                anyio.create_task_group() as self._tasks,
            ):
                self._tasks.start_soon(self._run_members, supervision)
                await self._until_ended()
        except BaseExceptionGroup as group:
            error = leaf_of(group)
            error.__cause__ = error.__cause__ or group
        finally:
            self._tasks = None
            lost = sum(not member.is_finished for member in self.members)
            self._tally.outcomes[Outcome.CANCELLED] += lost
            self._bad.log()
        error = error or self._final_error()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and only the collector would end that

    async def _until_ended(self) -> None:
        """Wait for the members; the caller's cancellation reaches them through here only."""
        try:
            await self._ended.wait()
        except (anyio.get_cancelled_exc_class(), KeyboardInterrupt):
            self._is_cancelled = True
            self._admission.cancel()  # from here on nothing starts that would not be reached
            with anyio.CancelScope(shield=True):
                await self._end_all(tuple(self._running))
                await self._ended.wait()
            raise
        finally:  # on asyncio a second Task.cancel waits for nothing
            self._shield.shield = False

    async def _end_all(self, scopes: Iterable[Cancellable]) -> None:
        """Cancel these, no more in a round than may be woken."""
        for scope in scopes:
            await self._wakes.take()
            scope.cancel()

    async def _run_members(self, supervision: Supervision) -> None:
        try:
            with self._shield:
                async with anyio.create_task_group() as self._concluding:
                    with self._admission:
                        await self._admit(supervision)
                    while self._running:
                        self._has_left = anyio.Event()
                        await self._has_left.wait()
        finally:
            self._concluding = None
            self._ended.set()

    async def _admit(self, supervision: Supervision) -> None:
        conclude = self._conclude_soon
        for row, member in _by_priority(self.members):
            recorded = (
                None
                if member.log is None
                else member.log.finished(member.prompt, member.identity.group)
            )
            if recorded is not None:
                await self._wakes.take(UNSTARTED)
                await self._finish(row, member, recorded, self._deliver, is_recorded=True)
            elif await self._take_place(member):
                self._tally.running += 1
                deadline = self._next_deadline()
                self._start(AgentRun(supervision, member, row, deadline, conclude))
            else:
                await self._wakes.take(UNSTARTED)
                await self._finish(row, member, self._unstarted(member), self._deliver)

    async def _take_place(self, member: Member) -> bool:
        """Wait for a place; False where the member was cancelled or the batch's time is over."""
        if member.cancel_reason is not None:
            return False
        with anyio.CancelScope(deadline=self._deadline.at) as scope:
            member.scope = scope
            await self._limiter.acquire_on_behalf_of(member)
        member.scope = None
        if scope.cancelled_caught:
            return False
        if member.cancel_reason is not None:
            self._limiter.release_on_behalf_of(member)
            return False
        return True

    def _unstarted(self, member: Member) -> Trajectory:
        if member.cancel_reason is not None:
            ending = Ending(outcome=Outcome.CANCELLED, reason=member.cancel_reason)
        else:
            over = self._deadline.error()
            ending = Ending(outcome=over.outcome, reason=over.reason, limit_source=over.source)
        return ended_before_start(member, ending)

    def _start(self, run: AgentRun) -> None:
        self._running[run] = None
        self._runner.start(run)
        if self._is_cancelled:
            run.cancel()

    def _conclude_soon(self, run: AgentRun) -> None:
        """An agent has ended; the rest of its trajectory is for a task of its own."""
        if self._concluding is None or self._is_cancelled:
            self._runner.note(run)
            self._leave(run, run)
            return
        scope = anyio.CancelScope()
        self._running[scope] = self._running.pop(run)
        self._concluding.start_soon(self._conclude, run, scope)

    async def _conclude(self, run: AgentRun, scope: anyio.CancelScope) -> None:
        again: AgentRun | None = None
        try:
            with scope:
                trajectory = await self._runner.conclude(run)
                if isinstance(trajectory, AgentRun):
                    again = trajectory
                    self._start(again)
                else:
                    await self._finish(run.row, run.member, trajectory, self._deliver)
        finally:
            if again is None:
                self._leave(run, scope)
            else:
                del self._running[scope]

    def _leave(self, run: AgentRun, last: Cancellable) -> None:
        """Give the member's place back; `last` was the last of it that could be cancelled."""
        del self._running[last]
        run.forget()
        self._tally.running -= 1
        self._limiter.release_on_behalf_of(run.member)
        if not self._running:
            self._has_left.set()

    def _next_deadline(self) -> Deadline:
        """The batch's, for one more member."""
        places = max(1, int(self._limiter.total_tokens))
        late_s = self._started % places // TOGETHER * STAGGER_S
        self._started += 1
        if late_s != self._last_deadline.late_s:  # else they share one
            self._last_deadline = msgspec.structs.replace(self._deadline, late_s=late_s)
        return self._last_deadline

    async def _finish(
        self,
        row: int,
        member: Member,
        trajectory: Trajectory,
        deliver: Deliver,
        *,
        is_recorded: bool = False,
    ) -> None:
        """Settle the member, so that nothing can end it twice, and hand its trajectory over."""
        member.is_finished = True
        if trajectory.limit_source == self._deadline.source:
            self._met_deadline = True
            if self._config.on_deadline == "drop":
                trajectory.trainable = False
        if member.log is not None and not is_recorded:
            member.log.end(trajectory)
        self._tally.outcomes[trajectory.outcome] += 1
        self._bad.add(trajectory)
        if trajectory.outcome is Outcome.FAILED and self._is_over_budget():
            self.cancel(None, None, "failure_budget")
        if member.log is None or await self._is_written(member.log):
            await deliver(row, trajectory)
        else:
            self.unwritten.append((row, trajectory))

    async def _is_written(self, log: TrajectoryLog) -> bool:
        """Whether the journal has it; waits for that until the batch's time is over."""
        is_written = await log.until_written(self._deadline.at, lambda: self._is_closed)
        if not is_written:
            self._unwritten_error = log.failure
        return is_written

    def _is_over_budget(self) -> bool:
        failed, most = self._bad.failures.total(), self._config.max_failures
        share = self._config.max_failure_share * len(self.members)
        return most is not None and failed > most and failed > share

    def _final_error(self) -> RolloutError | None:
        """The error that a finished batch ends with, if any."""
        if self._unwritten_error is not None:
            return self._unwritten_error
        if self._is_closed:
            return RolloutError("the runtime was closed while this call was running")
        if self._is_over_budget():
            causes = self._bad.failures
            listed = causes.most_common(LISTED_CAUSES)
            lines = "".join(f"\n  {count} × {words}" for words, count in listed)
            more = len(causes) - len(listed)
            return LimitExceeded(
                f"{causes.total()} of {len(self.members)} trajectories failed "
                f"(scheduling.max_failures = {self._config.max_failures}, scheduling."
                f"max_failure_share = {self._config.max_failure_share:g}); the batch stopped:"
                + lines
                + (f"\n  and {more} further causes" if more else ""),
                source="scheduling.max_failures",
                reason="failures",
                outcome=Outcome.FAILED,
            )
        if self._met_deadline and self._config.on_deadline == "raise":
            return self._deadline.error()
        return None


def _by_priority(members: Sequence[Member]) -> list[tuple[int, Member]]:
    """The members with their rows, those of the highest priority first, else in their order."""
    if all(member.prompt.priority == members[0].prompt.priority for member in members):
        return list(enumerate(members))
    return sorted(enumerate(members), key=lambda pair: -pair[1].prompt.priority)
