"""Judges whether the engine at the other end of a channel is alive.

Only time in which our own loop could have listened counts as silence: a trainer that blocks it for
a minute loses no engine.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio

from rollout.engine.wire.protocol import Ping

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollout.engine.wire.frames import FrameStream
    from rollout.engine.wire.protocol import Role, Terms

#: Rounds of the loop in which a reader takes what had arrived: the socket is polled, the reader is
#: woken, it reads. Both backends need fewer.
DRAIN_ROUNDS = 5


class Heartbeat:
    """When to send the next heartbeat, and whether the peer answers.

    On the data connection any byte is a sign of life: a long frame may hold an answer back. On the
    control connection only an answer is, so that an engine that speaks and does not listen is
    found out.

    Attributes:
        silence_s: Of the peer, when it was last judged.
    """

    def __init__(self, frames: Mapping[Role, FrameStream], terms: Terms) -> None:
        self.silence_s = 0.0
        self._connected: list[FrameStream] = []
        self._frames = frames
        self._terms = terms
        self._next = 0.0
        frames["data"].is_heard_by_bytes = True

    @contextmanager
    def watching(self, role: Role) -> Iterator[None]:
        """Judge this connection while the block lasts."""
        frames = self._frames[role]
        frames.heard_at = anyio.current_time()
        self._connected.append(frames)
        try:
            yield
        finally:
            self._connected.remove(frames)

    def ping_nowait(self, number: int) -> None:
        """Ask on every connection in use for a sign of life."""
        for frames in self._connected:
            frames.send_nowait(Ping(number))

    def answered(self, role: Role) -> None:
        """The peer answered a heartbeat."""
        self._frames[role].heard_at = anyio.current_time()

    async def is_due(self) -> bool:
        """Return True when it is time for a heartbeat; False when the peer is to be given up."""
        self._next = self._next or anyio.current_time()
        while True:
            due = min(self._next, self._heard_at() + self._terms.heartbeat_timeout_s)
            await anyio.sleep_until(due)
            self._forgive(anyio.current_time() - due)
            if await self._is_silent():
                return False
            now = anyio.current_time()
            if now >= self._next:
                self._next = now + self._terms.heartbeat_s
                return True

    def _heard_at(self) -> float:
        """When the connection that has been silent for longest was last heard."""
        return min((frames.heard_at for frames in self._connected), default=math.inf)

    def _forgive(self, lag_s: float) -> None:
        now = anyio.current_time()
        for frames in self._connected:
            frames.heard_at = min(now, frames.heard_at + lag_s)

    async def _is_silent(self) -> bool:
        for _ in range(DRAIN_ROUNDS):
            self.silence_s = anyio.current_time() - self._heard_at()
            if self.silence_s < self._terms.heartbeat_timeout_s:
                return False
            await anyio.lowlevel.checkpoint()
        return True
