"""Frames of a journal: ``u32 length | u32 CRC-32 | payload``, little-endian."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollout.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: What a journal begins with; the number is the version of its format.
MAGIC = b"rollout journal 1\n"
_MAGIC_OF_ANY = b"rollout journal "
_HEAD = struct.Struct("<II")
encode_into = msgspec.msgpack.Encoder().encode_into
_NO_HEAD = bytes(_HEAD.size)
#: Bytes for which zlib keeps the interpreter: to hand it over costs more than their checksum.
_PIECE = 4096
#: No frame is longer; what says otherwise is no frame.
MAX_PAYLOAD = 1 << 30


class Frame(NamedTuple):
    """Where a payload lies in the file."""

    start: int
    payload: memoryview


class TornTail(NamedTuple):
    """What follows the last whole frame of a journal; it begins at `start`."""

    start: int
    size: int


def frame_into(frames: bytearray, entry: Any) -> None:
    """Append a record as it stands in the file."""
    start = len(frames)
    frames += _NO_HEAD
    encode_into(entry, frames, start + _HEAD.size)
    with memoryview(frames) as view:
        checksum = _checksum(view[start + _HEAD.size :])
    _HEAD.pack_into(frames, start, len(frames) - start - _HEAD.size, checksum)


def _checksum(payload: memoryview) -> int:
    """Its CRC-32; of pieces, because zlib lets other threads run during longer ones."""
    value = 0
    for start in range(0, len(payload), _PIECE):
        value = zlib.crc32(payload[start : start + _PIECE], value)
    return value


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
        size = _HEAD.size + len(payload)
        yield Frame(start, payload)  # whose payload may be released
        start += size


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
