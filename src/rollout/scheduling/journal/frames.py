"""Frames of a journal: ``mark | u32 length | u64 XXH3 | payload``, little-endian.

The payload is a msgpack array of records: those that are encoded together share a frame, because
each costs the driver as much as several records.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from rollout.chat.plain_data import encoder
from rollout.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

#: What a journal begins with; the number is the version of its format.
MAGIC = b"rollout journal 5\n"
MAGIC_OF_ANY = b"rollout journal "
#: What each frame begins with: in other bytes it stands in one place in billions.
MARK = b"\xfarj\xf4"
_HEAD = struct.Struct("<4sIQ")
_MARK = re.compile(re.escape(MARK))
_encode_into, _encode = encoder.encode_into, encoder.encode
_raw_records = msgspec.msgpack.Decoder(list[msgspec.Raw])
#: No frame is longer; what says otherwise is no frame.
MAX_PAYLOAD = 1 << 30


#: Of a frame that holds one prompt or trajectory, what is kept for all but that.
_REST = 1 << 16


def most_bytes() -> int:
    """How long a packed prompt or trajectory may be."""
    return MAX_PAYLOAD - _REST


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
    """A frame that is filled, written and filled again, in memory of its own.

    Memory of before is kept: what grows again takes it from the system page by page, and that costs
    three times the encoding.

    Attributes:
        head, payload: Its bytes, as they follow each other in the file.
        count: Of its records.
        is_whole: Whether they are not divided.
    """

    __slots__ = ("count", "head", "is_whole", "payload")

    def __init__(self) -> None:
        self.head, self.payload = b"", bytearray()
        self.count, self.is_whole = 0, False

    def fill(self, records: Sequence[Any], *, is_whole: bool = False) -> None:
        """Have it hold these records, and nothing else. Their bytes are summed while they are hot.

        Args:
            records: In order.
            is_whole: As the attribute.

        Raises:
            TypeError, ValueError, OverflowError: One cannot be encoded.
        """
        payload = self.payload
        _encode_into(records, payload)  # with an offset, it would give up its memory first
        if not self.is_too_large:
            self.head = _HEAD.pack(MARK, len(payload), xxh3_64_intdigest(payload))
        self.count, self.is_whole = len(records), is_whole

    @property
    def is_too_large(self) -> bool:
        """Whether who reads it would take it for none."""
        return len(self.payload) > MAX_PAYLOAD

    def __len__(self) -> int:
        return len(self.head) + len(self.payload)

    def divided(self) -> list[FrameBuffer]:
        """Its records, each in a frame of its own, or itself where they are kept together."""
        records = _raw_records.decode(self.payload)
        if self.is_whole or len(records) < 2:
            return [self]
        made = [FrameBuffer() for _ in records]
        for frame, record in zip(made, records, strict=True):
            frame.fill([record])
        return made


def records_of(frame: Frame) -> list[tuple[int, bytes]]:
    """The records of a frame: where each begins in the file, and its bytes.

    Raises:
        msgspec.MsgspecError: It holds none.
    """
    records = _raw_records.decode(frame.payload)
    found = []
    at = frame.start + _HEAD.size
    at += len(_encode([None] * len(records))) - len(records)  # what an array begins with
    for record in map(bytes, records):
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
    """Where the next whole frame begins, from there on; None where none does."""
    while found := _MARK.search(data, start):
        if _payload(data, found.start()) is not None:
            return found.start()
        start = found.start() + 1
    return None


def _payload(data: memoryview, start: int) -> memoryview | None:
    """That of the frame there; None where none is whole."""
    begin = start + _HEAD.size
    if begin > len(data):
        return None
    mark, length, checksum = _HEAD.unpack_from(data, start)
    if mark != MARK or not 0 < length <= MAX_PAYLOAD or begin + length > len(data):
        return None
    payload = data[begin : begin + length]
    return payload if xxh3_64_intdigest(payload) == checksum else None
