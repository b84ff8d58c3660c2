"""Messages over byte streams, whole and in order, also across a broken connection.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

from collections import deque
from struct import Struct
from typing import TYPE_CHECKING

import anyio

from rollout.engine.protocol import Ack, CutError, FrameError, FrameTooLongError, encoder

if TYPE_CHECKING:
    import msgspec
    from anyio.abc import ByteStream

#: A frame past this is a fault of the peer: 16 M tokens with log-probs are still below it.
MAX_FRAME_BYTES = 256 * 1024 * 1024
#: Bytes asked of the socket at once; larger reads cost memory and gain nothing on loopback.
READ_BYTES = 256 * 1024
#: Bytes waiting to be written from which on callers should wait: eight prompts of 32k tokens.
HIGH_WATER_BYTES = 1024 * 1024
#: The peer is told what has arrived every so many bytes, and then forgets them.
ACK_BYTES = 256 * 1024
#: … and at a heartbeat, when little happens, every so many.
IDLE_ACK_BYTES = 1024
_length = Struct("<I")


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
        self._incoming = bytearray()
        self._needed = 0
        self._outgoing = bytearray()
        self._unconfirmed: deque[bytearray] = deque()
        self._confirmed = 0
        self._sent = 0
        self._acknowledged = 0
        self._wake: anyio.Event | None = None
        self._room: anyio.Event | None = None
        self.received = 0
        self.heard_at = 0.0
        self.is_heard_by_bytes = False

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that callers should wait too."""
        return len(self._outgoing) >= HIGH_WATER_BYTES

    async def wait_for_room(self) -> None:
        """Return when not `is_full`."""
        while self.is_full:
            if self._room is None:
                self._room = anyio.Event()
            await self._room.wait()

    def let_all_pass(self) -> None:
        """Wake those who wait for room: the connection is over."""
        self._outgoing = bytearray()
        self._make_room()

    def send_nowait(self, message: msgspec.Struct) -> None:
        """Queue one message; never waits.

        Raises:
            FrameTooLongError: It is past the maximum; nothing has been queued.
            OverflowError: An integer does not fit into 64 bits; nothing has been queued.
        """
        start = len(self._outgoing)
        self._outgoing += b"\0\0\0\0"
        try:
            encoder.encode_into(message, self._outgoing, -1)
            length = len(self._outgoing) - start - 4
            if length > self._max_frame:
                name = type(message).__name__
                raise FrameTooLongError(
                    f"a {name} of {length} bytes; {self._max_frame} fit in a frame"
                )
        except BaseException:
            del self._outgoing[start:]  # half a frame would end the connection
            raise
        _length.pack_into(self._outgoing, start, length)
        if self._wake is not None:
            self._wake.set()

    async def flush(self) -> None:
        """Write what is queued; for the one task that owns the writing."""
        while self._outgoing:
            data, self._outgoing = self._outgoing, bytearray()
            self._unconfirmed.append(data)
            self._sent += len(data)
            self._make_room()
            await self._stream.send(data)  # type: ignore[arg-type]  # any buffer will do

    async def write_forever(self) -> None:
        """Write messages as they come, until the stream breaks or the task is cancelled."""
        while True:
            await self.flush()
            self._wake = anyio.Event()
            await self._wake.wait()
            self._wake = None

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None

    async def read(self) -> list[bytes]:
        """The payloads that have arrived, at least one.

        Raises:
            anyio.EndOfStream: The peer closed between two frames.
            CutError: It closed within one.
            FrameError: It announced one past the maximum.
        """
        return await self._read(most=None)

    async def read_one(self) -> bytes:
        """The next payload; what has arrived after it is left for later."""
        (payload,) = await self._read(most=1)
        return payload

    async def _read(self, most: int | None) -> list[bytes]:
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

    def _take_frames(self, data: bytes, most: int | None) -> list[bytes]:
        if self._incoming:
            self._incoming += data
            if len(self._incoming) < self._needed:
                return []
            data = bytes(self._incoming)
            self._incoming.clear()
        frames: list[bytes] = []
        at, end, self._needed = 0, len(data), 4
        while end - at >= 4 and len(frames) != most:
            (length,) = _length.unpack_from(data, at)
            if length > self._max_frame:
                raise FrameError(
                    f"a frame of {length} bytes was announced; {self._max_frame} at most"
                )
            if end - at - 4 < length:
                self._needed = length + 4
                break
            frames.append(data[at + 4 : at + 4 + length])
            at += 4 + length
        self._incoming += data[at:]
        self.received += at
        return frames

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
        """Go on over another connection whose handshake is done.

        Raises:
            FrameError: The peer claims to lack bytes that it had confirmed, or to have more than
                was sent.
        """
        if not self._confirmed <= peer_received <= self._sent:
            raise FrameError(f"the peer has {peer_received} bytes of {self._sent}: cannot go on")
        again = bytearray().join(self._unconfirmed)[peer_received - self._confirmed :]
        self._outgoing = again + self._outgoing
        self._unconfirmed.clear()
        self._confirmed = self._sent = peer_received
        self._stream = other._stream
        self._incoming, self._needed = other._incoming, 0

    async def aclose(self) -> None:
        """Close the stream at once; safe in a cancelled scope."""
        with anyio.CancelScope(shield=True):  # or what comes after would be skipped
            await anyio.aclose_forcefully(self._stream)
