"""What `generate` and `stream` give: trajectories as they end, kept or sent."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import anyio

from rollout.chat.trajectory import Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rollout.errors import JournalError
    from rollout.scheduling.member_group import Ended, Member
    from rollout.scheduling.run_log import RunLog

#: Finished trajectories that wait for a slow receiver before members wait too.
STREAM_BUFFER = 16


class Outbox:
    """The trajectories of a list's members that have ended.

    Args:
        members: In the order of their rows.
        is_stream: Whether they are sent, to `received`, when the journal has them.
        deadline: Until when a journal that cannot be written is waited for.
        on_change: Called when something was sent.

    Attributes:
        received: Where they come out.
        sending: How many calls of `deliver` wait for the journal or the receiver.
        unwritten: Why the journal could not be written, once that is so.
        is_closing: Nothing is waited for any more.
    """

    def __init__(
        self,
        members: Sequence[Member],
        log: RunLog,
        deadline: float,
        on_change: Callable[[], object],
        *,
        is_stream: bool,
    ) -> None:
        self.members, self.sending, self.is_closing = members, 0, False
        self.unwritten: JournalError | None = None
        self._log, self._deadline, self._on_change = log, deadline, on_change
        self._is_stream = is_stream
        #: What was sent only while somebody refers to it.
        self._found: dict[Member, Trajectory | weakref.ref[Trajectory]] = {}

    def open(self) -> None:
        """Have a stream; its ends are closed by `close_receiver`, and with `send`."""
        self.send, self.received = anyio.create_memory_object_stream[Trajectory](STREAM_BUFFER)

    def close_receiver(self) -> None:
        """Give out nothing more, and wait for nobody."""
        self.is_closing = True
        self.received.close()

    async def deliver(self, ended: Iterable[Ended]) -> None:
        """Keep trajectories, and send them; a slow receiver is waited for."""
        self._found.update(ended)
        self.sending += 1
        try:
            for member, trajectory in ended if self._is_stream else ():
                if await self.wait_until_written([member]):
                    await self.send.send(trajectory)
                    self._found[member] = weakref.ref(trajectory)
                    self._log.note_delivery([member])
        except anyio.BrokenResourceError:  # the receiver has left
            pass
        finally:
            self.sending -= 1
            self._on_change()

    async def wait_until_written(self, members: Sequence[Member]) -> bool:
        """Wait for the journal; False where it cannot be written, which is an error in the end."""
        last = max((each.log.number for each in members if each.log is not None), default=0)
        error = await self._log.wait_written(last, self._deadline, lambda: self.is_closing)
        self.unwritten = error or self.unwritten
        return error is None

    def list_trajectories(self) -> list[Trajectory]:
        """Those that have ended and are still referenced, in the order of their rows."""
        found = [self._found[each] for each in self.members if each in self._found]
        present = [each() if isinstance(each, weakref.ref) else each for each in found]
        return [trajectory for trajectory in present if trajectory is not None]
