"""Frames of a journal: ``u32 length | u32 CRC-32 | payload``, little-endian.

The payload is a msgpack array of records: those that are written together share a frame, because
each frame costs the driver as much as several records.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollout.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

#: What a journal begins with; the number is the version of its format.
MAGIC = b"rollout journal 1\n"
_MAGIC_OF_ANY = b"rollout journal "
_HEAD = struct.Struct("<II")
_encode_into = msgspec.msgpack.Encoder().encode_into
_raw_records = msgspec.msgpack.Decoder(list[msgspec.Raw])
_NO_HEAD = bytes(_HEAD.size)
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


def frame_into(frames: bytearray, records: Sequence[Any]) -> None:
    """Append a frame of these records as it stands in the file."""
    start = len(frames)
    frames += _NO_HEAD
    _encode_into(records, frames, start + _HEAD.size)
    with memoryview(frames) as view:
        checksum = zlib.crc32(view[start + _HEAD.size :])
    _HEAD.pack_into(frames, start, len(frames) - start - _HEAD.size, checksum)


def divided(frame: bytes | bytearray) -> list[bytearray]:
    """The records of a frame, each in a frame of its own."""
    made = []
    for record in _raw_records.decode(frame[_HEAD.size :]):
        single = bytearray()
        frame_into(single, [record])
        made.append(single)
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
    if found.startswith(_MAGIC_OF_ANY):
        version = bytes(data[len(_MAGIC_OF_ANY) : 64]).split(b"\n")[0].decode("ascii", "replace")
        raise JournalError(
            f"{path}: a journal of format {version}; this version reads format "
            f"{MAGIC[len(_MAGIC_OF_ANY) :].decode().strip()}"
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
