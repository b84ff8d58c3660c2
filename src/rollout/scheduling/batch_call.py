"""A call of `generate` or `stream`: all groups of a list, delivered member by member."""

from __future__ import annotations

import weakref
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from rollout.chat.trajectory import Trajectory
from rollout.scheduling.calls import Call
from rollout.scheduling.endings import CLOSED
from rollout.scheduling.groups import Groups, Wanted
from rollout.scheduling.member_group import Ended, Member, MemberGroup, cancel_members
from rollout.scheduling.scheduler import LOST
from rollout.types import name_prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

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
        group = MemberGroup(number, name_prompt(prompt, uid))
        group.add_members(samples, step=step, run_seed=run_seed, validate=validate)
        groups.append(group)
    return groups


class BatchCall(Call):
    """A call of `generate` or `stream`.

    Args:
        groups: Made by `make_groups`.
        is_stream: Whether trajectories are sent as they end.

    Attributes:
        members: All of them, in the order of their rows.
        received: Where the trajectories of a stream come out: `STREAM_BUFFER` wait there for a
            slow receiver, and then members wait, with their slots.
        was_left: Whether its caller left it before its end, and learns of no error.
    """

    surplus_reason = LOST

    def __init__(
        self,
        scheduler: Scheduler,
        groups: Sequence[MemberGroup],
        *,
        step: int,
        deadline: Deadline,
        is_stream: bool = False,
    ) -> None:
        self.name = "stream" if is_stream else "generate"
        self.members = [member for group in groups for member in group.waiting]
        samples, count = len(groups[0].waiting) if groups else 1, len(self.members)
        wanted = Groups(Wanted(groups=len(groups), members=samples))
        super().__init__(scheduler, wanted, step=step, deadline=deadline, count=count)
        self.was_left = False
        #: Those that have ended; those that were sent only while somebody refers to them.
        self._found: dict[Member, Trajectory | weakref.ref[Trajectory]] = {}
        self._sending = 0
        self._unwritten: JournalError | None = None
        self._untold = {} if scheduler.rewards_groups else None
        for group in sorted(groups, key=lambda group: -group.prompt.priority):
            group.call = self
            self.groups.adopt(group)
        self.groups.stop_pulling()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """See `Call.running`."""
        self._send, self.received = anyio.create_memory_object_stream[Trajectory](STREAM_BUFFER)
        async with super().running():
            with self.received:  # members wait for it
                yield

    async def _run(self) -> None:
        self._tally.admitted += len(self.members)
        for member in self.members:
            member.batch = self.batch
        with self._send:
            try:
                await super()._run()
            finally:
                self.was_left = self._is_leaving and not self.is_closed

    async def wait(self) -> None:
        """Wait until every member has ended; no member has a slot then.

        Raises:
            BaseException: As `find_error` says; every member has been delivered, unless a task of
                the library's own failed.
        """
        await self._has_ended.wait()
        if not self._has_crashed:
            await self._wait_until_written(self.members)
        error = self.find_error()
        if error is not None:
            raise error

    def find_error(self) -> BaseException | None:
        """Find the error that a call ends with which nobody left before its end, if any.

        It is that of the journal, of a runtime that was closed, or a `LimitExceeded`: more members
        failed than `scheduling.max_failures` allows, or the time was over and
        `scheduling.on_deadline` is "raise".
        """
        if self._unwritten is not None or self.failure is not None:
            return self._unwritten or self.failure
        if self._bad.are_too_many:
            return self._bad.make_error()
        if self._met_deadline and self._config.on_deadline == "raise":
            return self.deadline.error()
        return None

    def list_trajectories(self) -> list[Trajectory]:
        """Those that have ended and are still referenced, in the order of their rows."""
        found = [self._found[each] for each in self.members if each in self._found]
        present = [each() if isinstance(each, weakref.ref) else each for each in found]
        return [trajectory for trajectory in present if trajectory is not None]

    def close(self) -> None:
        """Cancel every member because the runtime closes; a stream gives nothing more."""
        super().close()
        cancel_members(self._list_unrewarded(), CLOSED)
        self.received.close()

    @property
    def _has_crashed(self) -> bool:
        """Whether a task raised: what else runs is cancelled, and has no trajectory."""
        return self.failure is not None and not self.is_closed

    @property
    def _is_done(self) -> bool:
        if self._has_crashed or (self._is_leaving and not self.is_closed):
            return True
        has_work = self._judging or self._sending or self._has_tasks
        return self.groups.is_complete and not has_work

    @property
    def _waits_for_groups(self) -> bool:
        return self.scheduler.rewards_groups

    async def _leave(self, left: Leftovers) -> None:
        await super()._leave(left)
        self._tell(tuple(self._untold or ()))
        self.scheduler.count_lost([each for each in self.members if not each.is_finished])

    def _tell(self, members: Iterable[Member]) -> None:
        """Tell readers of events that members have their outcomes, and their rewards."""
        untold = self._untold or {}
        for member in members:
            if member in untold:
                self.scheduler.tell_end(member, untold.pop(member))

    def _fail(self, error: BaseException) -> None:
        self.cancel(None, None, "failure_budget")

    async def _wait_until_written(self, members: Sequence[Member]) -> bool:
        """Wait for the journal; False where it cannot be written, which is an error in the end."""
        last = max((each.log.number for each in members if each.log is not None), default=0)
        unwritten = await self._log.wait_written(
            last, self.deadline.at, lambda: self.is_closed or self._is_leaving
        )
        self._unwritten = unwritten or self._unwritten
        return unwritten is None

    async def _hand_over(self, group: MemberGroup, wanted: Sequence[Ended]) -> None:
        self._tell([each.member for each in wanted])
        if self._events.tells_all:
            self._emit_group_ended(wanted)
        self.groups.settle(group, "accepted")
        self.groups.take()
        group.ended = []  # else members, their groups and trajectories refer to each other
        if self._waits_for_groups:
            for member, trajectory in wanted:
                await self._deliver(member, trajectory)

    async def _deliver_alone(self, member: Member, trajectory: Trajectory) -> None:
        if not self._waits_for_groups:
            await self._deliver(member, trajectory)

    async def _deliver(self, member: Member, trajectory: Trajectory) -> None:
        """Keep a trajectory for the batch, or send it."""
        self._found[member] = trajectory
        if self.name == "generate":
            return
        self._sending += 1
        try:
            if await self._wait_until_written([member]):
                await self._send.send(trajectory)
                self._found[member] = weakref.ref(trajectory)
                self._log.note_delivery([member])
        except anyio.BrokenResourceError:  # the receiver has left
            pass
        finally:
            self._sending -= 1
            self.scheduler.change()
