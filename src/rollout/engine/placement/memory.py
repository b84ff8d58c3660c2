"""A pair of byte streams in memory, with the faults of a network.

The in-process placement speaks through it, so that framing, coalescing and cuts are exercised in
virtual time too.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import ByteStream

from rollout.engine.channel.framing import Notifier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Bytes one side may have sent before the other has read; a sender waits beyond it.
WINDOW_BYTES = 1024 * 1024


class MemoryByteStream(ByteStream):
    """One end of a pair made by `memory_stream_pair`: it holds what its peer has sent."""

    def __init__(self, latency_s: float, max_read: int | None) -> None:
        self.peer = self
        self._latency_s = latency_s
        self._max_read = max_read
        self._pieces: deque[tuple[float, bytes]] = deque()  # with when they may be read
        self._unread = 0
        self._is_closed = self._has_ended = self._is_broken = self._is_stalled = False
        self._changed = Notifier()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """The next bytes; `EndOfStream` once the peer has closed and all is read."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._is_closed:
            raise anyio.ClosedResourceError
        while not self._pieces or (self._is_stalled and not self._is_broken):
            if self._is_broken:
                raise anyio.BrokenResourceError
            if self._has_ended:
                raise anyio.EndOfStream
            await self._changed.wait()
        due, data = self._pieces.popleft()
        # Only one task reads, so holding the piece across the sleep loses nothing unless that
        # reader is cancelled, and then the connection is over.
        if due > anyio.current_time():
            await anyio.sleep_until(due)
        size = min(max_bytes, self._max_read or max_bytes)
        if len(data) > size:
            self._pieces.appendleft((due, data[size:]))
            data = data[:size]
        self._unread -= len(data)
        self._changed.notify()
        await anyio.lowlevel.cancel_shielded_checkpoint()
        return data

    async def send(self, item: bytes) -> None:
        """Hand over bytes; waits while the peer has too much unread."""
        await anyio.lowlevel.checkpoint()
        peer = self.peer
        if self._is_closed:
            raise anyio.ClosedResourceError
        while peer._unread >= WINDOW_BYTES and not (peer._is_broken or peer._has_ended):
            await peer._changed.wait()
        if peer._is_broken or peer._has_ended:
            raise anyio.BrokenResourceError
        peer._pieces.append((anyio.current_time() + self._latency_s, item))
        peer._unread += len(item)
        peer._changed.notify()

    async def send_eof(self) -> None:
        """Tell the peer that nothing more comes."""
        self.peer._has_ended = True
        self.peer._changed.notify()

    def cut(self, *, after: Callable[[int], int] = lambda _: 0) -> None:
        """Break both directions at once, as a lost network does.

        `after` maps the bytes that an end has not read yet to how many of them still arrive.
        """
        for end in (self, self.peer):
            data = b"".join(piece for _, piece in end._pieces)
            arriving = data[: after(len(data))]
            end._pieces.clear()
            if arriving:
                end._pieces.append((anyio.current_time(), arriving))
            end._unread = len(arriving)
            end._is_broken = True
            end._changed.notify()

    def stall(self) -> None:
        """Deliver nothing any more, in either direction, as where one end is frozen."""
        self._is_stalled = self.peer._is_stalled = True

    async def aclose(self) -> None:
        """Close both directions; the peer reads what was sent and then the end."""
        self._is_closed = True
        for end in (self, self.peer):
            end._has_ended = True
            end._changed.notify()
        await anyio.lowlevel.checkpoint()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """None: there is no socket under it."""
        return {}


def memory_stream_pair(
    latency_s: float = 0.0, max_read: int | None = None
) -> tuple[MemoryByteStream, MemoryByteStream]:
    """Two connected ends; bytes become readable `latency_s` later, at most `max_read` at once."""
    one, other = MemoryByteStream(latency_s, max_read), MemoryByteStream(latency_s, max_read)
    one.peer, other.peer = other, one
    return one, other
