"""A call of `generate` or `stream`: all groups of a list, delivered member by member."""

from __future__ import annotations

import weakref
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from rollout.agents.identity import named
from rollout.chat.trajectory import Trajectory
from rollout.scheduling.calls import Call
from rollout.scheduling.endings import CLOSED
from rollout.scheduling.groups import Groups, Wanted
from rollout.scheduling.member_group import Ended, MemberGroup, cancel_members
from rollout.scheduling.scheduler import LOST

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rollout.errors import JournalError
    from rollout.limits import Deadline
    from rollout.scheduling.groups import Leftovers
    from rollout.scheduling.scheduler import Scheduler
    from rollout.types import Prompt

#: Finished trajectories that wait for a slow receiver before members wait too.
STREAM_BUFFER = 16


def make_groups(
    prompts: Sequence[Prompt],
    uids: Sequence[str],
    *,
    samples: int,
    step: int,
    run_seed: int,
    validate: bool,
) -> list[MemberGroup]:
    """Make a group of `samples` members of each prompt, in the order of their rows."""
    groups = []
    for number, (prompt, uid) in enumerate(zip(prompts, uids, strict=True)):
        group = MemberGroup(number, named(prompt, uid))
        row = number * samples
        group.add_members(samples, step=step, run_seed=run_seed, validate=validate, row=row)
        groups.append(group)
    return groups


class BatchCall(Call):
    """A call of `generate`.

    Attributes:
        members: All of them, in the order of their rows.
        rows: The trajectory of each, once it has ended.
    """

    name = "generate"
    surplus_reason = LOST

    def __init__(
        self,
        scheduler: Scheduler,
        groups: Sequence[MemberGroup],
        *,
        step: int,
        deadline: Deadline,
    ) -> None:
        self.members = [member for group in groups for member in group.waiting]
        self.rows: list[Trajectory | None] = [None] * len(self.members)
        samples, count = len(groups[0].waiting) if groups else 1, len(self.members)
        wanted = Groups(Wanted(groups=len(groups), members=samples))
        super().__init__(scheduler, wanted, step=step, deadline=deadline, count=count)
        self.waits_for_groups = self.counts_with_group = scheduler.rewards_groups
        self._unwritten: JournalError | None = None
        for group in sorted(groups, key=lambda group: -group.prompt.priority):
            group.call = self
            self.groups.adopt(group)

    async def run(self) -> None:
        """See `Call.run`."""
        self._tally.admitted += len(self.members)
        for member in self.members:
            member.batch = self.batch
        await super().run()

    async def wait(self) -> None:
        """Wait until every member has been delivered; no member has a slot then.

        Raises:
            LimitExceeded: More members failed than `scheduling.max_failures` allows, or the time
                was over and `scheduling.on_deadline` is "raise"; every member has been delivered.
            JournalError: The journal could not be written until then.
            RolloutError: `close` was called; every member has been delivered.
        """
        await self._has_ended.wait()
        if not self._has_crashed:
            ended = [Ended(m.row, m, self.rows[m.row]) for m in self.members]  # type: ignore[arg-type]
            await self._wait_until_written(ended)
        error = self._find_error()
        if error is not None:
            raise error

    def close(self) -> None:
        """Cancel every member because the runtime closes; trajectories are delivered as usual."""
        super().close()
        cancel_members(self._list_unrewarded(), CLOSED)

    @property
    def _has_crashed(self) -> bool:
        """Whether a task raised: what else runs is cancelled, and has no trajectory."""
        return self.failure is not None and not self.is_closed

    @property
    def _is_done(self) -> bool:
        if self._has_crashed or (self._is_leaving and not self.is_closed):
            return True
        return self.groups.is_complete and not self._judging and not self._has_tasks

    async def _return_groups(self, left: Leftovers) -> None:
        await super()._return_groups(left)
        self.scheduler.count_lost([each for each in self.members if not each.is_finished])

    def _fail(self, error: BaseException) -> None:
        self.cancel(None, None, "failure_budget")

    def _find_error(self) -> BaseException | None:
        """Find the error that a batch ends with which nobody left before its end, if any."""
        if self._unwritten is not None or self.failure is not None:
            return self._unwritten or self.failure
        if self._bad.are_too_many:
            return self._bad.make_error()
        if self._met_deadline and self._config.on_deadline == "raise":
            return self.deadline.error()
        return None

    async def _wait_until_written(self, ended: Sequence[Ended]) -> bool:
        """Wait for the journal; False where it cannot be written, which is an error in the end."""
        unwritten = await self._log.wait_written(
            ended, self.deadline.at, lambda: self.is_closed or self._is_leaving
        )
        self._unwritten = unwritten or self._unwritten
        return unwritten is None

    async def _hand_over(self, group: MemberGroup, wanted: Sequence[Ended]) -> None:
        if self.counts_with_group:
            for ended in wanted:
                self._count(ended)
        if self._events.tells_all:
            self._emit_group_ended(wanted)
        self.groups.settle(group, "accepted")
        group.ended = []  # else members, their groups and trajectories refer to each other
        if self.waits_for_groups:
            for ended in wanted:
                await self._deliver(ended)

    async def _deliver_alone(self, ended: Ended) -> None:
        if not self.waits_for_groups:
            await self._deliver(ended)

    async def _deliver(self, ended: Ended) -> None:
        """Put a trajectory into its row of the batch."""
        self.rows[ended.row] = ended.trajectory


class StreamCall(BatchCall):
    """A call of `stream`.

    Attributes:
        received: Where its trajectories come out: `STREAM_BUFFER` wait there for a slow receiver,
            and then members wait, with their slots.
        error: What the call ends with, unless its caller left it before; None: no error.
    """

    name = "stream"
    error: BaseException | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """See `Call.running`."""
        self._send, self.received = anyio.create_memory_object_stream[Trajectory](STREAM_BUFFER)
        #: Trajectories that were sent, while somebody refers to them; the others are in `rows`.
        self._sent: dict[int, weakref.ref[Trajectory]] = {}
        async with super().running():
            try:
                yield
            finally:
                self.received.close()

    async def run(self) -> None:
        """See `Call.run`."""
        with self._send:
            try:
                await super().run()
            finally:
                if self.is_closed or not self._is_leaving:
                    self.error = self._find_error()

    def close(self) -> None:
        """Cancel every member because the runtime closes; deliver no more trajectories."""
        super().close()
        self.received.close()

    def list_trajectories(self) -> list[Trajectory]:
        """Those that have ended and are still referenced, in the order of their rows."""
        found = {row: find() for row, find in self._sent.items()}
        found |= {row: each for row, each in enumerate(self.rows) if each is not None}
        return [trajectory for _, trajectory in sorted(found.items()) if trajectory is not None]

    async def _deliver(self, ended: Ended) -> None:
        row, member, trajectory = ended
        self.rows[row] = trajectory
        if not await self._wait_until_written([ended]):
            return
        self._sent[row] = weakref.ref(trajectory)
        try:
            await self._send.send(trajectory)
        except anyio.BrokenResourceError:  # the receiver has left
            return
        self.rows[row] = None
        if member.log is not None:
            member.log.delivered()
