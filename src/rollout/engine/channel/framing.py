"""Messages over a byte stream: ``u32 length (little-endian) | msgpack``.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio
import msgspec

from rollout.engine.channel.messages import FrameError, FrameTooLongError, encoder
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import ByteStream
    from msgspec.msgpack import Decoder

Message = TypeVar("Message")

#: Bytes read at once: about a millisecond of work for the reader.
READ_BYTES = 256 * 1024
#: Messages handled before other tasks run, and before the loop looks at its timers and sockets.
FRAMES_A_ROUND = 10
#: An unauthenticated peer cannot make us buffer more than this.
HANDSHAKE_FRAME_BYTES = 64 * 1024
#: Bytes waiting to be written from which on callers should wait: eight prompts of 32k tokens.
HIGH_WATER_BYTES = 1024 * 1024
#: What reading or writing raises when a connection is of no more use.
CONNECTION_ERRORS = (
    anyio.EndOfStream,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    OSError,
)
#: What a decoder raises on hostile bytes; deep nesting and huge numbers among them.
_DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, MemoryError)
_length = Struct("<I")


class Notifier:
    """Wakes all tasks that wait for a change; costs nothing where none does."""

    def __init__(self) -> None:
        self._changed: anyio.Event | None = None

    async def wait(self) -> None:
        """Return at the next `notify`."""
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def notify(self) -> None:
        """Wake all waiting tasks."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None


class FrameStream(Generic[Message]):
    """Frames over a byte stream, read by one task and written by one task.

    `send_nowait` only appends to a buffer; `run` sends what has gathered. So a caller's
    cancellation never truncates a frame, and many small messages share a system call.

    Args:
        decoder: Of the messages that are read.

    Attributes:
        max_frame_bytes: Longest message, either way; short until the peer has proved itself.
        signs_of_life: Counts reads that brought bytes, and messages that were handled.
    """

    def __init__(self, stream: ByteStream, decoder: Decoder[Message]) -> None:
        self.max_frame_bytes = HANDSHAKE_FRAME_BYTES
        self.signs_of_life = 0
        self._stream, self._decoder = stream, decoder
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._sending = 0
        self._has_outgoing = anyio.Event()
        self._written = Notifier()

    @property
    def queued(self) -> int:
        """Bytes that wait to be written."""
        return len(self._outgoing) + self._sending

    async def wait_for_room(self) -> None:
        """Return when a caller may send more, or when nothing is written any more."""
        while self.queued >= HIGH_WATER_BYTES:
            await self._written.wait()

    async def wait_until_written(self) -> None:
        """Return when the system has taken what is queued."""
        while self.queued:
            await self._written.wait()

    def send_nowait(self, message: msgspec.Struct) -> None:
        """Queue one message; never waits.

        Raises:
            FrameTooLongError: It is past the maximum; nothing has been queued.
        """
        buffer = self._outgoing
        start = len(buffer)
        buffer += b"\0\0\0\0"
        try:
            encoder.encode_into(message, buffer, -1)
            length = len(buffer) - start - 4
            if length > self.max_frame_bytes:
                raise FrameTooLongError(
                    f"{type(message).__name__} of {length} bytes; "
                    f"{self.max_frame_bytes} are allowed"
                )
        except BaseException:
            del buffer[start:]  # half a frame would end the connection
            raise
        _length.pack_into(buffer, start, length)
        if not start:  # else the writer knows already
            self._has_outgoing.set()

    async def flush(self) -> None:
        """Write what is queued; for the one task that writes."""
        while self._outgoing:
            data, self._outgoing = self._outgoing, bytearray()
            self._sending = len(data)
            await self._stream.send(data)  # type: ignore[arg-type]  # any buffer will do
            self._sending = 0
            self._written.notify()

    async def run(self, handle: Callable[[Message], object]) -> None:
        """Write messages as they are queued, and hand over those that come, until cancelled.

        Raises:
            anyio.EndOfStream: The peer has closed the connection; or another `CONNECTION_ERRORS`.
        """
        async with open_task_group() as tasks:
            tasks.start_soon(self._write)
            handled = 0
            while True:
                for message in await self.read():
                    if handled % FRAMES_A_ROUND == 0:
                        await anyio.lowlevel.checkpoint()
                    handled += 1
                    self.signs_of_life += 1
                    handle(message)

    async def _write(self) -> None:
        while True:
            self._has_outgoing = anyio.Event()
            await self.flush()
            await self._has_outgoing.wait()

    async def read_one(self) -> Message:
        """Return the next message; what has arrived after it is left for later."""
        (message,) = await self.read(most=1)
        return message

    async def read(self, most: int | None = None) -> list[Message]:
        """Return the messages that have arrived, at least one and at `most` so many.

        Raises:
            FrameError: What has arrived is no frame, or holds no message.
        """
        while not (messages := self._split_incoming(most)):
            try:
                self._incoming += await self._stream.receive(READ_BYTES)
            except anyio.EndOfStream:
                if self._incoming:
                    raise FrameError("the connection ended in the middle of a frame") from None
                raise
            self.signs_of_life += 1
        return messages

    def _split_incoming(self, most: int | None) -> list[Message]:
        """Take complete frames out of what has arrived."""
        incoming, start = self._incoming, 0
        messages: list[Message] = []
        while len(incoming) >= start + 4 and len(messages) != most:
            length: int = _length.unpack_from(incoming, start)[0]
            if length > self.max_frame_bytes:
                raise FrameError(
                    f"a frame of {length} bytes was announced; {self.max_frame_bytes} at most"
                )
            stop = start + 4 + length
            if len(incoming) < stop:
                break
            try:
                messages.append(self._decoder.decode(incoming[start + 4 : stop]))
            except _DECODE_ERRORS as error:
                raise FrameError(f"not a message: {error}") from None
            start = stop
        del incoming[:start]
        return messages

    def discard_outgoing(self) -> None:
        """Write nothing more, and let callers that wait for that continue."""
        self._outgoing = bytearray()
        self._sending = 0
        self._written.notify()

    async def aclose(self) -> None:
        """Close the stream at once; safe in a cancelled scope."""
        self.discard_outgoing()
        with anyio.CancelScope(shield=True):  # or what comes after would be skipped
            await anyio.aclose_forcefully(self._stream)
