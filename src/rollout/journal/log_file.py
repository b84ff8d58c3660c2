"""The file of a journal: a line that names the format, then frames.

A frame is ``u32 length | u32 crc32 | payload``, little-endian; the payload is a record in msgpack.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

from rollout.errors import ConfigError, JournalError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rollout.journal.records import Span

logger = logging.getLogger("rollout.journal")

#: What a journal begins with; the number is the version of its format.
MAGIC = b"rollout journal 8\n"
MAGIC_PREFIX = b"rollout journal "
HEAD = struct.Struct("<II")
#: The first byte of a record, which is an array.
_ARRAY = re.compile(rb"[\x90-\x9f\xdc]")


def make_frame(payload: bytes) -> bytes:
    """Frame a record."""
    return HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def read_frames(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield where each frame begins, and its payload; None for a torn tail, which comes last.

    A tail is torn where the process or machine died while it was written: nothing after it is a
    whole frame.

    Raises:
        JournalError: The file cannot be read, is no journal, is one of another format, or is
            damaged; names the byte.
    """
    try:
        with path.open("rb") as file:
            start = len(MAGIC)
            if not _check_magic(path, file.read(start)):
                if path.stat().st_size:
                    yield 0, None
                return
            while head := file.read(HEAD.size):
                payload = None
                if len(head) == HEAD.size:
                    length, checksum = HEAD.unpack(head)
                    payload = file.read(length)
                    if not length or len(payload) < length or zlib.crc32(payload) != checksum:
                        payload = None
                if payload is None:
                    file.seek(start)
                    _check_tail(path, start, file.read())
                    yield start, None
                    return
                yield start, payload
                start += HEAD.size + len(payload)
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error


def _check_magic(path: Path, found: bytes) -> bool:
    """Check the first line; False where a death cut it short."""
    if found == MAGIC:
        return True
    if MAGIC.startswith(found):
        return False
    if found.startswith(MAGIC_PREFIX):
        number = found[len(MAGIC_PREFIX) :].decode("ascii", "replace").strip()
        raise JournalError(
            f"{path}: a journal of format {number}; this version reads format "
            f"{MAGIC[len(MAGIC_PREFIX) :].decode().strip()}"
        )
    raise JournalError(f"{path}: is no journal")


def _check_tail(path: Path, start: int, tail: bytes) -> None:
    """Refuse a tail that has a whole frame in it: then the file is damaged, and not torn."""
    for found in _ARRAY.finditer(tail, HEAD.size + 1):
        begin = found.start()
        length, checksum = HEAD.unpack_from(tail, begin - HEAD.size)
        payload = memoryview(tail)[begin : begin + length]
        if 0 < length == len(payload) and zlib.crc32(payload) == checksum:
            raise JournalError(
                f"{path}: is damaged at byte {start}: no whole record begins there, though one "
                f"begins at byte {start + begin - HEAD.size}. Nothing is cut off. Where there is "
                f"no better copy, the first {start} bytes alone can be resumed "
                f"(truncate --size={start})"
            )


class LogFile:
    """A journal open for appending, which no other runtime writes meanwhile.

    Args:
        path: The file; it is made where there is none.

    Attributes:
        size: Bytes of its whole frames.

    Raises:
        OSError: It cannot be opened.
        ConfigError: Another runtime writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        try:
            lock_file(self._descriptor, path)
        except ConfigError:
            self.close()
            raise

    def read(self, span: Span) -> bytes:
        """Read the payload of a record."""
        return os.pread(self._descriptor, span.size, span.start)

    def cut(self, size: int, *, syncs: bool) -> None:
        """Keep so many bytes, and begin a new file with its first line.

        Args:
            size: Of the whole frames; what follows them is cut off.
            syncs: Whether the name of a new file, and its folders, are to be on the disk.
        """
        self.size = size
        if os.fstat(self._descriptor).st_size > size:
            os.ftruncate(self._descriptor, size)
        for folder in self.path.absolute().parents if syncs and not size else ():
            with suppress(OSError):  # some may be as new as the file; not each system does this
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def append(self, frames: Sequence[bytes], *, syncs: bool) -> None:
        """Append frames, all of them or none.

        Args:
            syncs: Whether they are to be on the disk when this returns.

        Raises:
            OSError: They could not be written, or not be synced.
        """
        os.ftruncate(self._descriptor, self.size)  # what a failed write has left
        data = (b"" if self.size else MAGIC) + b"".join(frames)
        done = 0
        while done < len(data):
            done += os.write(self._descriptor, data[done:])
        if syncs:
            os.fdatasync(self._descriptor)
        self.size += len(data)

    def close(self) -> None:
        """Close the file, which also unlocks it."""
        os.close(self._descriptor)


def lock_file(descriptor: int, path: Path) -> None:
    """Lock a journal; where its file system has no locks, warn.

    Raises:
        ConfigError: Another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"journal.path = {str(path)!r}: cannot be opened: another runtime writes it"
        ) from error
    except OSError as error:
        logger.warning(
            "%s: its file system cannot lock it (%s); see that no other run writes it",
            path,
            error.strerror,
        )


def find_path_fault(path: Path) -> str | None:
    """Say what is wrong with the path of a journal, as far as that shows without writing."""
    fault = None
    try:
        str(path).encode()
        there = next(each for each in path.absolute().parents if each.exists() or each.is_symlink())
        if "\0" in str(path):
            fault = "expected a path, which holds no NUL"
        elif path.exists() and not path.is_file():  # to read a pipe would wait for ever
            what = "a directory" if path.is_dir() else "no file"
            fault = f"is {what}; expected a file, or a new one"
        elif not there.is_dir():
            fault = f"cannot be written: {there} is no directory"
        elif not os.access(path if path.exists() else there, os.R_OK | os.W_OK):
            fault = "cannot be read and written by this user"
    except UnicodeEncodeError:
        fault = "expected a path in UTF-8, which the journal can name"
    except OSError as error:
        fault = error.strerror
    return None if fault is None else f"journal.path = {str(path)!r}: {fault}"
