"""Frames of a journal: ``u32 length | u32 CRC-32 | payload``, little-endian.

The payload is a msgpack array of records: those that are written together share a frame, because
each frame costs the driver as much as several records.
"""

from __future__ import annotations

import struct
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollout.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: What a journal begins with; the number is the version of its format.
MAGIC = b"rollout journal 2\n"
MAGIC_OF_ANY = b"rollout journal "
_HEAD = struct.Struct("<II")
_encode_into = msgspec.msgpack.Encoder().encode_into
_raw_records = msgspec.msgpack.Decoder(list[msgspec.Raw])
#: Of an array whose length is a u32: what it begins with, so that it can be filled as records come.
_ARRAY, _COUNT = 0xDD, struct.Struct(">BI")
_EMPTY = bytes(_HEAD.size + _COUNT.size)
#: No frame is longer; what says otherwise is no frame.
MAX_PAYLOAD = 1 << 30


class Frame(NamedTuple):
    """Where a frame begins in the file, and what it holds."""

    start: int
    payload: memoryview

    @property
    def stop(self) -> int:
        """Where it ends in the file."""
        return self.start + _HEAD.size + len(self.payload)


class TornTail(NamedTuple):
    """What follows the last whole frame of a journal; it begins at `start`."""

    start: int
    size: int


class FrameBuffer:
    """A frame that is filled, written and filled again: memory that is new for each one would come
    from the system, page by page.

    Records are encoded as they come, while they are in the cache.

    Attributes:
        size: In bytes, as far as it is filled.
        count: Of its records.
    """

    __slots__ = ("_buffer", "_together", "count", "size")

    def __init__(self) -> None:
        self._buffer = bytearray(_EMPTY)
        #: Of records that are not divided, where they start and stop.
        self._together: dict[int, int] = {}
        self.size, self.count = len(_EMPTY), 0

    def clear(self) -> None:
        """It is empty."""
        self.size, self.count = len(_EMPTY), 0
        self._together.clear()

    def add(self, record: Any) -> None:
        """One more record.

        Raises:
            TypeError, ValueError, OverflowError: It cannot be encoded; the frame is as it was.
        """
        buffer = self._buffer
        _encode_into(record, buffer, self.size)
        self.size = len(buffer)
        self.count += 1

    def keep_together(self, start: int) -> None:
        """The records from this number on are not divided."""
        self._together[start] = self.count

    @contextmanager
    def closed(self) -> Iterator[memoryview]:
        """It as it stands in the file, in the block."""
        _COUNT.pack_into(self._buffer, _HEAD.size, _ARRAY, self.count)
        with memoryview(self._buffer) as whole, whole[: self.size] as frame:
            with frame[_HEAD.size :] as payload:
                checksum = zlib.crc32(payload)
            _HEAD.pack_into(frame, 0, self.size - _HEAD.size, checksum)
            yield frame

    def divided(self) -> list[FrameBuffer]:
        """Its records, each in a frame of its own, or with those that it is kept together with."""
        with self.closed() as frame:
            records = _raw_records.decode(frame[_HEAD.size :])
        made, at = [], 0
        while at < len(records):
            part, stop = FrameBuffer(), self._together.get(at, at + 1)
            for record in records[at:stop]:
                part.add(record)
            part.keep_together(0)
            made.append(part)
            at = stop
        return made


def records_of(frame: Frame) -> list[tuple[int, bytes]]:
    """The records of a frame: where each begins in the file, and its bytes.

    Raises:
        msgspec.MsgspecError: It holds none.
    """
    records = [bytes(each) for each in _raw_records.decode(frame.payload)]
    at = frame.stop - sum(map(len, records))
    found = []
    for record in records:
        found.append((at, record))
        at += len(record)
    return found


def check_magic(path: Path, data: memoryview) -> bool:
    """Whether the file's first line is whole; one that a death cut short is not.

    Raises:
        JournalError: It is no journal, or one of another version.
    """
    found = bytes(data[: len(MAGIC)])
    if found == MAGIC:
        return True
    if MAGIC.startswith(found):
        return False
    if found.startswith(MAGIC_OF_ANY):
        version = bytes(data[len(MAGIC_OF_ANY) : 64]).split(b"\n")[0].decode("ascii", "replace")
        raise JournalError(
            f"{path}: a journal of format {version}; this version reads format "
            f"{MAGIC[len(MAGIC_OF_ANY) :].decode().strip()}"
        )
    raise JournalError(f"{path}: is no journal")


def frames(data: memoryview) -> Iterator[Frame | TornTail]:
    """The whole frames after the first line, then what follows the last of them, if anything."""
    start = len(MAGIC)
    while start < len(data):
        payload = _payload(data, start)
        if payload is None:
            yield TornTail(start, len(data) - start)
            return
        frame = Frame(start, payload)
        start = frame.stop
        yield frame  # whose payload may be released


def _payload(data: memoryview, start: int) -> memoryview | None:
    """That of the frame there; None where none is whole."""
    begin = start + _HEAD.size
    if begin > len(data):
        return None
    length, checksum = _HEAD.unpack_from(data, start)
    if not 0 < length <= MAX_PAYLOAD or begin + length > len(data):
        return None
    payload = data[begin : begin + length]
    return payload if zlib.crc32(payload) == checksum else None
