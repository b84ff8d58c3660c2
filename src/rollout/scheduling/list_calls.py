"""Calls of `generate` and `stream`: all groups of a list, whose trajectories are kept or sent."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import anyio

from rollout.chat.trajectory import Trajectory
from rollout.scheduling.calls import Call
from rollout.scheduling.endings import CLOSED, LOST
from rollout.scheduling.groups import Groups
from rollout.scheduling.members import cancel_members
from rollout.scheduling.trajectory_events import emit_ended, emit_group_ended

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rollout.errors import JournalError
    from rollout.limits import Deadline
    from rollout.scheduling.members import Member, MemberGroup
    from rollout.scheduling.scheduler import Scheduler


class ListCall(Call):
    """A call that runs every member of a list's groups, each of which gets one outcome.

    Args:
        batch: The groups, whose members all wait.
        samples: Members of each.
        name: "generate"; or "stream", which sends trajectories to `received` as they end.
        deadline: Its own; until then a journal that cannot be written is waited for too.

    Attributes:
        members: In the order of their rows.
        received: Where trajectories come out, once the call runs.
    """

    is_list = True

    def __init__(
        self,
        scheduler: Scheduler,
        batch: Sequence[MemberGroup],
        samples: int,
        *,
        name: str,
        step: int,
        deadline: Deadline,
    ) -> None:
        self.members = [member for group in batch for member in group.waiting]
        groups = Groups(len(batch), samples)
        groups.stop()  # there are no others
        super().__init__(scheduler, groups, name=name, step=step, deadline=deadline)
        self._batch = batch
        #: Those that were delivered; what was sent only while somebody refers to it.
        self._found: dict[Member, Trajectory | weakref.ref[Trajectory]] = {}
        self._delivering = 0
        #: Why the journal could not be written, once that is so.
        self._unwritten: JournalError | None = None

    def _begin(self) -> None:
        """Adopt the groups, those of a higher priority first."""
        # A slow receiver has as many finished trajectories waiting as may run; then members wait.
        room = self._config.max_in_flight
        self._send, self.received = anyio.create_memory_object_stream[Trajectory](room)
        for group in sorted(self._batch, key=lambda group: -group.prompt.priority):
            group.join(self)
            self.groups.adopt(group)
        self._tally.admitted += len(self.members)

    @property
    def _is_done(self) -> bool:
        """Whether all is delivered; or its caller leaves it, or a task of it has failed."""
        if self.is_leaving and not self.is_closed:
            return True
        return self.has_crashed or (self.groups.is_done and not self._delivering)

    @property
    def has_crashed(self) -> bool:
        """Whether a task raised: what else runs is cancelled, and has no trajectory."""
        return self.failure is not None and not self.is_closed

    def leave(self) -> None:
        """Note that the caller leaves, and give it nothing more."""
        self.received.close()  # members wait for it
        super().leave()

    def close(self) -> None:
        """End it because the runtime is being closed: every member gets its outcome."""
        super().close()
        cancel_members(self.list_unrewarded(), CLOSED)
        self.received.close()

    def _end_for_failures(self) -> None:
        """Cancel the members; when they are delivered, `find_error` has the error."""
        self.cancel(None, None, "failure_budget")

    async def _end_members(self) -> None:
        """Cancel what its caller does not wait for any more: nobody gets its trajectories."""
        open_groups = tuple(self.groups.open)
        cancel_members(self.groups.take_leftovers().surplus, LOST)
        await self._wait_members()
        for group in open_groups:
            self._tell_rewarded(group.ended)
        self.scheduler.count_lost(self.members)
        for group in self._batch:  # which would refer to this call, and it to them
            group.call = None
            group.release()
        self._send.close()

    # Deliveries.

    async def finish_member(
        self, member: Member, trajectory: Trajectory, *, is_unstarted: bool = False
    ) -> None:
        """Note the end of a member, and deliver it where it does not wait for its group."""
        await super().finish_member(member, trajectory, is_unstarted=is_unstarted)
        if not self.waits_for_group:
            await self._deliver({member: trajectory})

    async def _settle_group(self, group: MemberGroup, wanted: Mapping[Member, Trajectory]) -> None:
        """End a group; deliver its members, where they have waited for each other."""
        self._tell_rewarded(wanted)
        if self.scheduler.events.tells_all:
            emit_group_ended(self.scheduler.events, wanted)
        self.groups.settle(group, "delivered")
        if self.waits_for_group:
            await self._deliver(wanted)

    def _tell_rewarded(self, ended: Mapping[Member, Trajectory]) -> None:
        """Tell readers of events of members whose group has its reward, or will get none."""
        for member, trajectory in ended.items() if self.waits_for_group else ():
            emit_ended(self.scheduler.events, member, trajectory)

    async def _deliver(self, ended: Mapping[Member, Trajectory]) -> None:
        """Keep trajectories, and send those of a stream; a slow receiver is waited for."""
        self._found.update(ended)
        self._delivering += 1
        try:
            for member, trajectory in ended.items() if self.name == "stream" else ():
                if await self._wait_written([member]):
                    await self._send.send(trajectory)
                    self._found[member] = weakref.ref(trajectory)
                    self.scheduler.log.note_delivery([member])
        except anyio.BrokenResourceError:  # the receiver has left
            pass
        finally:
            self._delivering -= 1
            self.scheduler.change()

    async def _wait_written(self, members: Iterable[Member]) -> bool:
        """Wait for the journal; False where it cannot be written, which is an error in the end."""
        last = max((each.log.number for each in members if each.log is not None), default=0)
        error = await self.scheduler.log.wait_written(
            last, self.deadline.at, lambda: self.is_leaving or self.is_closed
        )
        self._unwritten = error or self._unwritten
        return error is None

    # What its caller gets.

    async def receive_batch(self) -> None:
        """Wait until every member has ended; no member has a slot then.

        Raises:
            BaseException: As `find_error` says; every member has been delivered, unless a task of
                the library's own failed.
        """
        await self.has_ended.wait()
        if not self.has_crashed:
            await self._wait_written(self.members)
        if (error := self.find_error()) is not None:
            raise error

    def list_trajectories(self) -> list[Trajectory]:
        """Those that have ended and are still referenced, in the order of their rows."""
        found = [self._found[each] for each in self.members if each in self._found]
        present = [each() if isinstance(each, weakref.ref) else each for each in found]
        return [trajectory for trajectory in present if trajectory is not None]

    def find_error(self) -> BaseException | None:
        """Find the error that the call ends with, if any.

        That is what it failed with, as where the runtime was closed; or a `LimitExceeded`, where
        too many members failed, or its time is over and that is an error.
        """
        if (error := self._unwritten or self.failure) is not None:
            return error
        if self._bad.are_too_many:
            return self._bad.make_error()
        if self._met_deadline and self._config.on_deadline == "raise":
            return self.deadline.error()
        return None
