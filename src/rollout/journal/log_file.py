"""The file of a journal: a line that names the format, then frames.

A frame is ``u32 length | u32 crc32 | payload``, little-endian; the payload is a record in msgpack.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import struct
import zlib
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio

from rollout.chat.plain_data import encoder
from rollout.disk_room import unwritable
from rollout.errors import ConfigError, JournalError
from rollout.scopes import open_task_group
from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from rollout.journal.records import Record

logger = logging.getLogger("rollout.journal")

FORMAT = 11
#: What a journal begins with.
MAGIC_PREFIX = b"rollout journal "
MAGIC = MAGIC_PREFIX + b"%d\n" % FORMAT
HEAD = struct.Struct("<II")
#: The first byte of a record, which is an array.
_ARRAY = re.compile(rb"[\x90-\x9f\xdc]")
#: How long records are gathered, and how long where somebody waits for them.
GATHER_S, HURRY_S = 0.2, 0.005
#: Between two attempts to write where the last one failed.
RETRY_S = 1.0
#: How long a waiter waits before it looks at its own limits again.
CHECK_S = 0.2


def read_frames(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield where each frame begins, and its payload; None for a torn tail, which comes last.

    A tail is torn where the process or machine died while it was written: nothing after it is a
    complete frame.

    Raises:
        JournalError: The file cannot be read, is no journal, is one of another format, or is
            damaged; names the byte.
    """
    try:
        with path.open("rb") as file:
            start, found = len(MAGIC), file.read(len(MAGIC))
            if not _check_magic(path, found):
                yield from [(0, None)] if found else []
                return
            while head := file.read(HEAD.size):
                length, checksum = HEAD.unpack(head.ljust(HEAD.size, b"\0"))
                payload = file.read(length)
                if not length or len(payload) < length or zlib.crc32(payload) != checksum:
                    file.seek(start)
                    _check_tail(path, start, file.read())
                    yield start, None
                    return
                yield start, payload
                start += HEAD.size + length
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error


def _check_magic(path: Path, found: bytes) -> bool:
    """Check the first line; False where a death cut it short."""
    if MAGIC.startswith(found):
        return found == MAGIC
    if not found.startswith(MAGIC_PREFIX):
        raise JournalError(f"{path}: is no journal")
    number = found.removeprefix(MAGIC_PREFIX).decode("ascii", "replace").strip()
    raise JournalError(f"{path}: a journal of format {number}; this version reads format {FORMAT}")


def _check_tail(path: Path, start: int, tail: bytes) -> None:
    """Refuse a tail that has a complete frame in it: then the file is damaged, and not torn."""
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

    `put` gathers records, and a task writes them in their order, in a thread. What cannot be
    written waits in memory, and is tried again.

    Args:
        path: The file; it is made where there is none.

    Attributes:
        size: Bytes of its complete frames; of a file that is resumed, set before it is written.
        put_count, written: Records put so far, and how many of them are written.
        failure: Why the last attempt to write failed; None where it did not.

    Raises:
        OSError: It cannot be opened.
        ConfigError: Another runtime writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = self.put_count = self.written = 0
        self.failure: JournalError | None = None
        self._frames: list[bytes] = []
        self._is_closed = self._may_continue = False
        #: A record waits; somebody waits for it; an attempt to write is over; the block is left.
        self._has_work, self._hurry = anyio.Event(), anyio.Event()
        self._changed, self._closing = anyio.Event(), anyio.Event()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        try:
            lock_file(self._descriptor, path)
        except ConfigError:
            self.close()
            raise

    def append(self, frames: Sequence[bytes], *, syncs: bool) -> None:
        """Append frames, all of them or none; what follows `size` bytes is cut off first.

        Args:
            syncs: Whether they, and the name of a new file, are to be on the disk at the return.

        Raises:
            OSError: They could not be written, or not be synced.
        """
        os.ftruncate(self._descriptor, self.size)
        data = (b"" if self.size else MAGIC) + b"".join(frames)
        done = 0
        while done < len(data):
            done += os.write(self._descriptor, data[done:])
        if syncs:
            os.fdatasync(self._descriptor)
        for folder in self.path.absolute().parents if syncs and not self.size else ():
            with suppress(OSError):  # some may be as new as the file; not each system does this
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        self.size += len(data)

    def close(self) -> None:
        """Unlock the file and close it."""
        with suppress(OSError):  # a child that was forked has the lock too, while it lives
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    # Records.

    def put(self, record: Record) -> int:
        """Have a record written; return its number, from 1. Raises what encoding it raises."""
        payload = encoder.encode(record)
        self._frames.append(HEAD.pack(len(payload), zlib.crc32(payload)) + payload)
        self.put_count += 1
        if len(self._frames) == 1:
            self._has_work.set()
        return self.put_count

    async def wait_written(
        self, number: int, deadline: float = math.inf, is_over: Callable[[], bool] = lambda: False
    ) -> JournalError | None:
        """Wait until a record is written, or need not be; return why it is not, if so.

        Args:
            number: Of the record; 0: none.
            deadline: Up to when this waits for a disk that refuses it.
            is_over: Whether nobody wants what is waited for any more.
        """
        gives_up = False
        while self.written < number and not (self._may_continue and self.failure is not None):
            if gives_up:
                closed = "the runtime was closed, and its journal with it"
                early = f"{self.path}: its call ended before a trajectory was written"
                return self.failure or JournalError(closed if self._is_closed else early)
            self._hurry.set()
            with anyio.move_on_after(CHECK_S):
                await self._changed.wait()
            is_late = self.failure is not None and anyio.current_time() >= deadline
            gives_up = is_late or self._is_closed or is_over()
        return None

    @asynccontextmanager
    async def writing(self, *, syncs: bool, may_continue: bool) -> AsyncIterator[None]:
        """Write what is put during the block; at its end what waits, once more.

        Args:
            syncs: Whether each batch is on the disk, and not only with the system, before it
                counts as written.
            may_continue: Whether nobody waits for a disk that refuses records.
        """
        self._may_continue = may_continue
        async with open_task_group() as tasks:
            tasks.start_soon(self._run, syncs)
            try:
                yield
            finally:
                for event in (self._closing, self._has_work, self._hurry):
                    event.set()

    async def _run(self, syncs: bool) -> None:
        with anyio.CancelScope(shield=True):
            while not self._closing.is_set():
                await self._has_work.wait()
                with anyio.move_on_after(GATHER_S):
                    await self._hurry.wait()
                    await anyio.sleep(HURRY_S)
                await self._write(syncs)
                if self.failure is not None:
                    with anyio.move_on_after(RETRY_S):
                        await self._closing.wait()
            await self._write(syncs)
        if self._frames:
            lost = f"{len(self._frames)} records are lost: a resumption works again on them"
            logger.error("%s; %s", self.path, lost)
        self._is_closed = True
        self._changed.set()

    async def _write(self, syncs: bool) -> None:
        """Write what was put so far."""
        frames, self._frames = self._frames, []
        self._has_work, self._hurry = anyio.Event(), anyio.Event()
        before, self.failure = self.failure, None
        try:
            await run_in_thread(partial(self.append, frames, syncs=syncs))
            self.written += len(frames)
        except OSError as error:
            self._frames[:0] = frames
            self._has_work.set()
            why = unwritable(self.path, error, sum(map(len, frames)))
            self.failure = JournalError(str(why))
            if before is None:
                logger.warning("%s; it is tried again", why)
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


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


def find_path_fault(path: Path, section: str = "journal", value: str = "") -> str | None:
    """Say what is wrong with a file that is to be continued, as far as that shows without writing.

    `section` is whose ``path`` leads to it; `value` is that, where it is not the file's own.
    """
    fault = ""
    try:
        str(path).encode()  # the journal names it
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        is_there = os.access(path, os.F_OK)
        if not (there.is_file() if is_there else there.is_dir()):  # a pipe would block
            fault = f"cannot be written: {there} is no {'file' if is_there else 'directory'}"
        elif not os.access(there, os.R_OK | os.W_OK):
            fault = "cannot be read and written by this user"
    except (OSError, ValueError) as error:
        fault = getattr(error, "strerror", None) or str(error)
    return f"{section}.path = {value or str(path)!r}: {fault}" if fault else None
