"""A pair of byte streams in memory, with the faults of a network.

The in-process placement speaks through it, so that framing, coalescing and cuts are exercised in
virtual time too.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import ByteStream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Bytes one side may have sent before the other has read; a sender waits beyond it.
WINDOW_BYTES = 1024 * 1024


class _Pipe:
    """One direction: pieces with the time at which they may be read."""

    def __init__(self, latency_s: float, max_read: int | None) -> None:
        self.latency_s = latency_s
        self.max_read = max_read
        self.pieces: deque[tuple[float, bytes]] = deque()
        self.unread = 0
        self.ended = False
        self.broken = False
        self.stalled = False
        self._changed = anyio.Event()

    def notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def put(self, data: bytes) -> None:
        while self.unread >= WINDOW_BYTES and not (self.broken or self.ended):
            await self._changed.wait()
        if self.broken or self.ended:
            raise anyio.BrokenResourceError
        self.pieces.append((anyio.current_time() + self.latency_s, data))
        self.unread += len(data)
        self.notify()

    async def get(self, max_bytes: int) -> bytes:
        while not self.pieces or (self.stalled and not self.broken):
            if self.broken:
                raise anyio.BrokenResourceError
            if self.ended:
                raise anyio.EndOfStream
            await self._changed.wait()
        due, data = self.pieces.popleft()
        # Only one task reads a direction, so holding the piece across the sleep loses nothing
        # unless that reader is cancelled, and then the connection is over.
        if due > anyio.current_time():
            await anyio.sleep_until(due)
        size = min(max_bytes, self.max_read or max_bytes)
        if len(data) > size:
            self.pieces.appendleft((due, data[size:]))
            data = data[:size]
        self.unread -= len(data)
        self.notify()
        return data


class MemoryByteStream(ByteStream):
    """One end of a pair made by `memory_stream_pair`."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """The next bytes; `EndOfStream` once the peer has closed and all is read."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise anyio.ClosedResourceError
        data = await self._incoming.get(max_bytes)
        await anyio.lowlevel.cancel_shielded_checkpoint()
        return data

    async def send(self, item: bytes) -> None:
        """Hand over bytes; waits while the peer has too much unread."""
        await anyio.lowlevel.checkpoint()
        if self._closed:
            raise anyio.ClosedResourceError
        await self._outgoing.put(item)

    async def send_eof(self) -> None:
        """Tell the peer that nothing more comes."""
        self._outgoing.ended = True
        self._outgoing.notify()

    def cut(self, *, after: Callable[[int], int] = lambda _: 0) -> None:
        """Break both directions at once, as a lost network does.

        `after` maps the bytes that the peer has not read yet to how many of them still arrive.
        """
        for pipe in (self._incoming, self._outgoing):
            data = b"".join(piece for _, piece in pipe.pieces)
            kept = data[: after(len(data))]
            pipe.pieces.clear()
            if kept:
                pipe.pieces.append((anyio.current_time(), kept))
            pipe.unread = len(kept)
            pipe.broken = True
            pipe.notify()

    def stall(self) -> None:
        """Deliver nothing any more, in either direction, as where one end is frozen."""
        for pipe in (self._incoming, self._outgoing):
            pipe.stalled = True

    async def aclose(self) -> None:
        """Close both directions; the peer reads what was sent and then the end."""
        self._closed = True
        for pipe in (self._incoming, self._outgoing):
            pipe.ended = True
            pipe.notify()
        await anyio.lowlevel.checkpoint()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """None: there is no socket under it."""
        return {}


def memory_stream_pair(
    latency_s: float = 0.0, max_read: int | None = None
) -> tuple[MemoryByteStream, MemoryByteStream]:
    """Two connected ends; bytes become readable `latency_s` later, at most `max_read` at once."""
    there, back = _Pipe(latency_s, max_read), _Pipe(latency_s, max_read)
    return MemoryByteStream(back, there), MemoryByteStream(there, back)
