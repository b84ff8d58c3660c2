"""Frames of a journal: ``u32 length | u32 CRC-32 | payload``, little-endian.

The payload is a msgpack array of arrays of records: those that are encoded together share an array,
and those that are written together a frame, because each costs the driver as much as several
records.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollout.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

#: What a journal begins with; the number is the version of its format.
MAGIC = b"rollout journal 3\n"
MAGIC_OF_ANY = b"rollout journal "
_HEAD = struct.Struct("<II")
_encode_into = msgspec.msgpack.Encoder().encode_into
_encode = msgspec.msgpack.Encoder().encode
_raw_batch = msgspec.msgpack.Decoder(list[msgspec.Raw])
_raw_batches = msgspec.msgpack.Decoder(list[list[msgspec.Raw]])
#: Of an array whose length is a u32: what it begins with, so that it can be filled as batches come.
_ARRAY, _COUNT = 0xDD, struct.Struct(">BI")
#: How a payload begins, in which are fewer than 2**24 batches: with an array of batches, which are
#: arrays of records, which are arrays that begin with a small number.
_FIRST_RECORD = re.compile(
    rb"\xdd\0...(?:[\x91-\x9f]|\xdc..|\xdd....)(?:[\x91-\x9f]|\xdc..)[\0-\x1f]", re.DOTALL
)
#: Bytes of a frame before its first batch.
_BEFORE = _HEAD.size + _COUNT.size
#: Bytes, and batches, with which a frame is full; the system writes 1024 parts at once.
FULL, _MOST_BATCHES = 1 << 19, 1 << 9
#: Batches whose memory is kept.
_KEPT = 16
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


class Damage(NamedTuple):
    """What holds no whole frame, though one begins after it; it begins at `start`."""

    start: int
    size: int


class FrameBuffer:
    """A frame that is filled, written and filled again.

    Each of its batches has memory of its own, which is kept: that of one long buffer would be given
    to the system and taken from it again, page by page, and that costs three times the encoding.

    Attributes:
        size: In bytes, as far as it is filled.
        count: Of its records.
    """

    __slots__ = ("_buffers", "_counts", "_wholes", "count", "size")

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []
        #: How many records each of its batches has, and which of them are not divided.
        self._counts: list[int] = []
        self._wholes: set[int] = set()
        self.size, self.count = _BEFORE, 0

    def clear(self) -> None:
        """It is empty."""
        self.size, self.count = _BEFORE, 0
        del self._buffers[_KEPT:]
        self._counts.clear()
        self._wholes.clear()

    @property
    def is_full(self) -> bool:
        """Whether it is as long as frames become."""
        return self.size > FULL or len(self._counts) >= _MOST_BATCHES

    def add(self, records: Sequence[Any], *, is_whole: bool = False) -> None:
        """One more batch of records.

        Args:
            records: In order.
            is_whole: Whether they are not divided.

        Raises:
            TypeError, ValueError, OverflowError: One cannot be encoded; the frame is as it was.
        """
        at = len(self._counts)
        if at == len(self._buffers):
            self._buffers.append(bytearray())
        buffer = self._buffers[at]
        _encode_into(records, buffer)
        if is_whole:
            self._wholes.add(at)
        self._counts.append(len(records))
        self.count += len(records)
        self.size += len(buffer)

    def parts(self) -> list[bytes | bytearray]:
        """It as it stands in the file, in parts; they are its own until it is cleared."""
        count = len(self._counts)
        checksum = zlib.crc32(begin := _COUNT.pack(_ARRAY, count))
        batches = self._buffers[:count]
        for each in batches:
            checksum = zlib.crc32(each, checksum)
        return [_HEAD.pack(self.size - _HEAD.size, checksum) + begin, *batches]

    def divided(self) -> list[FrameBuffer]:
        """Its records, each in a frame of its own, or with those that it is kept together with."""
        made = []
        for number, buffer in enumerate(self._buffers[: len(self._counts)]):
            records = _raw_batch.decode(buffer)
            is_whole = number in self._wholes
            for part in [records] if is_whole else [[each] for each in records]:
                made.append(FrameBuffer())
                made[-1].add(part, is_whole=is_whole)
        return made


def records_of(frame: Frame) -> list[tuple[int, bytes]]:
    """The records of a frame: where each begins in the file, and its bytes.

    Raises:
        msgspec.MsgspecError: It holds none.
    """
    found = []
    at = frame.start + _BEFORE
    for batch in _raw_batches.decode(frame.payload):
        at += len(_encode([None] * len(batch))) - len(batch)  # what an array begins with
        for record in map(bytes, batch):
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


def frames(data: memoryview) -> Iterator[Frame | Damage | TornTail]:
    """The whole frames after the first line, then what follows the last of them, if anything."""
    start = len(MAGIC)
    while start < len(data):
        payload = _payload(data, start)
        if payload is None:
            following = _next_frame(data, start + 1)
            if following is None:
                yield TornTail(start, len(data) - start)
                return
            yield Damage(start, following - start)
            start = following
            continue
        frame = Frame(start, payload)
        start = frame.stop
        yield frame  # whose payload may be released


def _next_frame(data: memoryview, start: int) -> int | None:
    """Where the next whole frame begins, from there on; None where none does.

    Only what looks like the first record of a payload is summed: in other bytes that is one place
    in hundreds of millions, so that a large file costs little more than a look at each byte.
    """
    at = start + _HEAD.size
    while found := _FIRST_RECORD.search(data, at):
        begin = found.start() - _HEAD.size
        if _payload(data, begin) is not None:
            return begin
        at = found.start() + 1
    return None


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
