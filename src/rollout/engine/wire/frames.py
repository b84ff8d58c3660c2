"""Messages over byte streams, whole and in order, also across a broken connection.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

from collections import deque
from struct import Struct
from typing import TYPE_CHECKING

import anyio

from rollout.engine.wire.protocol import Ack, CutError, FrameError, FrameTooLongError, encoder

if TYPE_CHECKING:
    import msgspec
    from anyio.abc import ByteStream

#: A frame past this is a fault of the peer: 16 M tokens with log-probs are still below it.
MAX_FRAME_BYTES = 256 * 1024 * 1024
#: Bytes asked of the socket at once; larger reads cost memory and gain nothing on loopback.
READ_BYTES = 256 * 1024
#: Bytes waiting to be written from which on callers should wait: eight prompts of 32k tokens.
HIGH_WATER_BYTES = 1024 * 1024
#: A frame from which on a buffer is sent as it is, and the next message begins a new one; to append
#: to it would move it again and again.
LONG_BYTES = 64 * 1024
#: The same for what has gathered: to grow further costs fresh pages, several for each message.
GATHERED_BYTES = 256 * 1024
#: The peer is told what has arrived every so many bytes, and then forgets them.
ACK_BYTES = 256 * 1024
#: … and at a heartbeat, when little happens, every so many.
IDLE_ACK_BYTES = 1024
_length = Struct("<I")
Piece = bytes | bytearray | memoryview


class FrameStream:
    """Messages over a byte stream, and over the ones that replace it.

    `send_nowait` only appends to a buffer; one task runs `write_forever` and flushes whatever has
    gathered, so that a caller's cancellation never truncates a frame and many small messages
    share a system call. What has been sent is kept until the peer says that it has arrived; after
    `continue_on`, the peer gets exactly what it had not.

    Attributes:
        received: Bytes that have arrived, in whole frames.
        heard_at: Clock time of the peer's last sign of life.
        is_heard_by_bytes: Whether any byte is one.
    """

    def __init__(self, stream: ByteStream, *, max_frame: int = MAX_FRAME_BYTES) -> None:
        self._stream = stream
        self._max_frame = max_frame
        self._incoming: list[Piece] = []
        self._gathered = self._needed = 0
        self._outgoing = bytearray()
        self._long: list[Piece] = []
        self._long_bytes = 0
        self._unconfirmed: deque[Piece] = deque()
        self._confirmed = 0
        self._sent = 0
        self._acknowledged = 0
        self._wake: anyio.Event | None = None
        self._waiters: dict[anyio.Event, int] = {}
        self._written: anyio.Event | None = None
        self.received = 0
        self.heard_at = 0.0
        self.is_heard_by_bytes = False

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that callers should wait too."""
        return self._queued >= HIGH_WATER_BYTES or bool(self._waiters)

    @property
    def _queued(self) -> int:
        return len(self._outgoing) + self._long_bytes

    async def wait_for_room(self, size: int) -> None:
        """Return when this caller may send about `size` bytes; callers go in their order."""
        turn = anyio.Event()
        self._waiters[turn] = size
        try:
            await turn.wait()
        except BaseException:
            if self._waiters.pop(turn, None) is None:
                self._make_room()  # the turn was ours; the next one gets it
            raise

    def let_all_pass(self) -> None:
        """Wake the callers that wait for room: the connection is over."""
        self._take_outgoing()
        for turn in self._waiters:
            turn.set()
        self._waiters.clear()

    def _make_room(self) -> None:
        """Wake as many as should fit: to wake all would cost each of them a turn for nothing."""
        room = HIGH_WATER_BYTES - self._queued
        while self._waiters and room > 0:
            turn = next(iter(self._waiters))
            room -= self._waiters.pop(turn)
            turn.set()

    def send_nowait(self, message: msgspec.Struct) -> None:
        """Queue one message; never waits.

        Raises:
            FrameTooLongError: It is past the maximum; nothing has been queued.
            OverflowError: An integer does not fit into 64 bits; nothing has been queued.
        """
        buffer = self._outgoing
        start = len(buffer)
        buffer += b"\0\0\0\0"
        try:
            encoder.encode_into(message, buffer, -1)
            length = len(buffer) - start - 4
            if length > self._max_frame:
                raise FrameTooLongError(
                    f"{type(message).__name__} of {length} bytes; {self._max_frame} are allowed"
                )
        except BaseException:
            del buffer[start:]  # half a frame would end the connection
            raise
        _length.pack_into(buffer, start, length)
        if length >= LONG_BYTES or start >= GATHERED_BYTES:
            self._long.append(buffer)
            self._long_bytes += len(buffer)
            self._outgoing = bytearray()
        if self._wake is not None:
            self._wake.set()
            self._wake = None

    def _take_outgoing(self) -> list[Piece]:
        pieces = self._long
        if self._outgoing:
            pieces.append(self._outgoing)
            self._outgoing = bytearray()
        self._long, self._long_bytes = [], 0
        return pieces

    async def flush(self) -> None:
        """Write what is queued; for the one task that owns the writing."""
        while self._outgoing or self._long:
            pieces = self._take_outgoing()
            self._unconfirmed += pieces
            self._sent += sum(map(len, pieces))
            self._make_room()
            for piece in pieces:
                await self._stream.send(piece)  # type: ignore[arg-type]  # any buffer will do

    async def written(self) -> None:
        """Return when the system has taken what is queued, with nothing left that waits."""
        if self._written is None:
            self._written = anyio.Event()
        await self._written.wait()

    async def write_forever(self) -> None:
        """Write messages as they come, until the stream breaks or the task is cancelled."""
        while True:
            await self.flush()
            if self._written is not None:
                self._written.set()
                self._written = None
            self._wake = wake = anyio.Event()
            await wake.wait()

    async def read(self) -> list[memoryview]:
        """The payloads that have arrived, at least one.

        Raises:
            anyio.EndOfStream: The peer closed between two frames.
            CutError: It closed within one.
            FrameError: It announced one past the maximum.
        """
        return await self._read(most=None)

    async def read_one(self) -> memoryview:
        """The next payload; what has arrived after it is left for later."""
        (payload,) = await self._read(most=1)
        return payload

    async def _read(self, most: int | None) -> list[memoryview]:
        frames = self._take_frames(b"", most) if self._incoming else []
        while not frames:
            try:
                data = await self._stream.receive(READ_BYTES)
            except anyio.EndOfStream:
                if self._incoming:
                    raise CutError("the connection ended in the middle of a frame") from None
                raise
            if self.is_heard_by_bytes:
                self.heard_at = anyio.current_time()
            frames = self._take_frames(data, most)
        return frames

    def _take_frames(self, data: Piece, most: int | None) -> list[memoryview]:
        frames: list[memoryview] = []
        view = memoryview(data)
        if self._incoming:
            self._gathered += len(view)
            if self._gathered < self._needed:
                self._incoming.append(view)
                return frames
            view = self._fill(view, frames)
        at, end, self._needed = 0, len(view), 4
        while (start := at + 4) <= end and len(frames) != most:
            length: int = _length.unpack_from(view, at)[0]
            stop = start + length
            if stop > end or length > self._max_frame:
                self._check(length)
                self._needed = stop - at
                break
            frames.append(view[start:stop])
            at = stop
        self.received += at
        if at < end:
            self._incoming.append(view[at:])
            self._gathered = end - at
        return frames

    def _fill(self, view: memoryview, frames: list[memoryview]) -> memoryview:
        """Finish the frame that was begun, without moving what comes after it; that is returned."""
        head = b"".join(self._incoming)
        self._incoming.clear()
        missing = 0
        if len(head) >= 4:
            length: int = _length.unpack_from(head, 0)[0]
            self._check(length)
            missing = 4 + length - len(head)
        if not 0 < missing <= len(view):
            return memoryview(head + view)
        frames.append(memoryview(head + view[:missing])[4:])
        self.received += len(head) + missing
        return view[missing:]

    def _check(self, length: int) -> None:
        if length > self._max_frame:
            raise FrameError(f"a frame of {length} bytes was announced; {self._max_frame} at most")

    def acknowledge_nowait(self, every: int = ACK_BYTES) -> None:
        """Tell the peer what has arrived, once that is at least `every` bytes."""
        if self.received - self._acknowledged >= every:
            self._acknowledged = self.received
            self.send_nowait(Ack(self.received))

    def confirmed(self, received: int) -> None:
        """The peer has so many bytes; they are not kept any longer.

        Raises:
            FrameError: So much has never been sent.
        """
        if received > self._sent:
            raise FrameError(f"{received} bytes were confirmed; {self._sent} have been sent")
        while self._unconfirmed and self._confirmed + len(self._unconfirmed[0]) <= received:
            self._confirmed += len(self._unconfirmed.popleft())

    def begin(self, max_frame: int) -> None:
        """Count from here: what came before was the handshake."""
        self._max_frame = max_frame
        self._unconfirmed.clear()
        self._confirmed = self._sent = self.received = self._acknowledged = 0

    def continue_on(self, other: FrameStream, peer_received: int) -> None:
        """Continue over another connection whose handshake is done.

        Raises:
            FrameError: The peer claims to lack bytes that it had confirmed, or to have more than
                was sent.
        """
        if not self._confirmed <= peer_received <= self._sent:
            raise FrameError(f"the peer has {peer_received} bytes of {self._sent}: cannot continue")
        again = b"".join(self._unconfirmed)[peer_received - self._confirmed :]
        if again:
            self._long.insert(0, again)
            self._long_bytes += len(again)
        self._unconfirmed.clear()
        self._confirmed = self._sent = peer_received
        self._stream = other._stream
        self._incoming, self._gathered, self._needed = other._incoming, other._gathered, 0

    async def aclose(self) -> None:
        """Close the stream at once; safe in a cancelled scope."""
        with anyio.CancelScope(shield=True):  # or what comes after would be skipped
            await anyio.aclose_forcefully(self._stream)
