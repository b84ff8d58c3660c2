"""A call of `stream`: a run whose trajectories wait for their receiver."""

from __future__ import annotations

import weakref
from operator import itemgetter
from typing import TYPE_CHECKING

import anyio
from anyio.abc import ObjectReceiveStream
from anyio.lowlevel import checkpoint_if_cancelled

from rollout.chat.trajectory import Trajectory
from rollout.errors import RolloutError
from rollout.scheduling.member_runs import CLOSED_MEANWHILE

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream

    from rollout.scheduling.batch_run import BatchRun

#: Finished trajectories that wait for a slow receiver before members wait too.
STREAM_BUFFER = 16


class TrajectoryStream(ObjectReceiveStream[Trajectory]):
    """Trajectories as they end: iterate over it, or `receive` one after the other.

    A receiver gets all that waits in one round of the loop, up to a buffer of it: one in each round
    would let those pile up that end in the same round, each in a task that waits.
    """

    def __init__(self, waiting: MemoryObjectReceiveStream[Trajectory]) -> None:
        self._waiting = waiting
        self._given = 0

    async def receive(self) -> Trajectory:
        """The next one, once it has ended.

        Raises:
            anyio.EndOfStream: There will be no more.
            anyio.ClosedResourceError: The stream has been left.
        """
        if self._given < STREAM_BUFFER:
            await checkpoint_if_cancelled()
            try:
                trajectory = self._waiting.receive_nowait()
            except anyio.WouldBlock:
                pass
            else:
                self._given += 1
                return trajectory
        self._given = 0
        return await self._waiting.receive()

    def receive_nowait(self) -> Trajectory:
        """One that has ended.

        Raises:
            anyio.WouldBlock: None waits.
            anyio.EndOfStream, anyio.ClosedResourceError: As `receive`.
        """
        return self._waiting.receive_nowait()

    def close(self) -> None:
        """Receive no more."""
        self._waiting.close()

    async def aclose(self) -> None:
        """Receive no more."""
        self.close()


class StreamedRun:
    """Runs in a task of the runtime's, so that a receiver that vanishes leaves nothing half open.

    Attributes:
        received: Where its trajectories come out.
        is_closed: Whether it was ended because the runtime is being closed.
        failure: What the run ended with; None where it ended well, or has not ended.
    """

    def __init__(self, run: BatchRun) -> None:
        self._run = run
        self._send, received = anyio.create_memory_object_stream[Trajectory](STREAM_BUFFER)
        self.received = TrajectoryStream(received)
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self.is_closed = False
        self._finished: dict[int, weakref.ref[Trajectory]] = {}
        self._kept: list[Trajectory] = []
        self.failure: BaseException | None = None

    async def produce(self) -> None:
        """Run to the end; it raises nothing but cancellation."""
        try:
            with self._scope:
                async with self._send:
                    await self._run.run(self._deliver)
        except (Exception, KeyboardInterrupt) as error:
            self.failure = error
        finally:
            self._ended.set()

    def trajectories(self) -> list[Trajectory]:
        """Those that have ended and are still referenced, in the order of their rows."""
        found = [(row, finished()) for row, finished in self._finished.items()]
        rows = sorted([*found, *self._run.unwritten], key=itemgetter(0))
        return [trajectory for _, trajectory in rows if trajectory is not None]

    def close(self) -> None:
        """End every trajectory and deliver no more of them; `failure` says so."""
        self.is_closed, self.failure = True, RolloutError(CLOSED_MEANWHILE)
        self._run.close()
        self.received.close()

    async def end(self) -> None:
        """Cancel what still runs, and wait for it; shielded."""
        if not self.is_closed:  # else it ends by itself, and keeps what there was
            self._scope.cancel()
        self.received.close()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    async def _deliver(self, row: int, trajectory: Trajectory) -> None:
        self._finished[row] = weakref.ref(trajectory)
        try:
            await self._send.send(trajectory)
            log = self._run.members[row].log
            if log is not None:
                log.delivered()
        except anyio.BrokenResourceError:  # the receiver has left
            self._kept.append(trajectory)
