"""One of a channel's two connections, replaced when it breaks."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol

import anyio

from rollout.engine.wire.handshake import RefusedError
from rollout.engine.wire.protocol import CONNECTION_ERRORS, CutError, FrameError

if TYPE_CHECKING:
    from rollout.engine.driver.heartbeat import Heartbeat
    from rollout.engine.wire.frames import FrameStream
    from rollout.engine.wire.greeting import Greeter
    from rollout.engine.wire.protocol import Role

logger = logging.getLogger("rollout.engine")

#: Between two attempts to replace a broken connection; doubled up to the second.
RECONNECT_BACKOFF_S = 0.05
MAX_RECONNECT_BACKOFF_S = 1.0
#: Frames handed over before other tasks run, and before the loop looks at its timers and sockets.
FRAMES_A_ROUND = 32


class ConnectionUser(Protocol):
    """The channel, as far as a connection needs it."""

    lost: anyio.Event
    lost_reason: str

    def take(self, role: Role, payload: bytes | memoryview) -> None:
        """One frame has come."""

    def lose(self, reason: str, *, is_link_fault: bool = False) -> None:
        """Nothing will come any more."""


class LastingConnection:
    """Reads and writes until the connection cannot be replaced, or the channel is lost.

    Nothing more is read before what was read is delivered.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        frames: FrameStream,
        greeter: Greeter,
        heartbeat: Heartbeat,
        user: ConnectionUser,
    ) -> None:
        self._name = name
        self._role = role
        self._frames = frames
        self._greeter = greeter
        self._heartbeat = heartbeat
        self._user = user
        self._arrived: deque[memoryview] = deque()

    async def keep(self) -> None:
        """Use the connection, and the ones that replace it when it breaks."""
        while True:
            reason = await self._converse()
            await self._deliver()  # the peer takes it for received, and does not send it again
            if not await self._reconnect(reason):
                return

    async def _converse(self) -> str:
        """Read and write until the connection breaks; why it did."""
        frames = self._frames
        reasons: list[str] = []

        async def write(scope: anyio.CancelScope) -> None:
            try:
                await frames.write_forever()
            except CONNECTION_ERRORS as error:
                reasons.append(_why(error))
                scope.cancel()

        with self._heartbeat.watching(self._role):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write, tasks.cancel_scope)
                try:
                    while not self._user.lost_reason:
                        self._arrived.extend(await frames.read())
                        await self._deliver()
                        frames.acknowledge_nowait()
                except CutError as error:
                    reasons.append(_why(error))
                except FrameError as error:
                    self._user.lose(_why(error), is_link_fault=True)
                except CONNECTION_ERRORS as error:
                    reasons.append(_why(error))
                tasks.cancel_scope.cancel()
        return reasons[0] if reasons else self._user.lost_reason

    async def _deliver(self) -> None:
        """Hand over what has arrived, a few frames in a round of the loop: each may wake a task."""
        user, arrived, frames = self._user, self._arrived, 0
        while arrived and not user.lost_reason:
            if frames == FRAMES_A_ROUND:
                await anyio.lowlevel.checkpoint()
                self._frames.heard_at = anyio.current_time()  # we did not listen meanwhile
                frames = 0
            frames += 1
            try:
                user.take(self._role, arrived.popleft())
            except FrameError as error:
                # It does not only break: it talks nonsense.
                user.lose(_why(error), is_link_fault=True)

    async def _reconnect(self, reason: str) -> bool:
        """Replace a connection; False where the channel is lost instead."""
        terms, backoff_s = self._greeter.terms, RECONNECT_BACKOFF_S
        frames = self._frames
        await frames.aclose()
        if self._user.lost.is_set():
            return False
        logger.debug("%s: %s; connecting again", self._name, reason)
        with anyio.move_on_after(terms.reconnect_s):
            while True:
                try:
                    new, welcome = await self._greeter.greet(self._role, received=frames.received)
                    frames.continue_on(new, welcome.received)
                except RefusedError as error:
                    self._user.lose(f"{reason}; {error}", is_link_fault=True)
                    return False
                except ConnectionRefusedError:
                    break  # nothing listens there any more
                except CONNECTION_ERRORS:
                    await anyio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, MAX_RECONNECT_BACKOFF_S)
                else:
                    return True
        self._user.lose(reason, is_link_fault=True)
        return False


def _why(error: BaseException) -> str:
    if isinstance(error, anyio.EndOfStream):
        return "the engine closed the connection"
    return f"the connection broke ({type(error).__name__}: {error})"
