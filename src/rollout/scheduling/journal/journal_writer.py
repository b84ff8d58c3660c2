"""Appends records to a journal, in batches, in a thread beside the event loop."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio

from rollout.bridge import event_type, has_virtual_clock, loop_poster
from rollout.disk_room import unwritable
from rollout.scheduling.journal.frames import MAGIC, OpenFrame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rollout.errors import RolloutError
    from rollout.scheduling.journal.entries import Entry

logger = logging.getLogger("rollout.journal")

#: How long records are gathered where nobody waits for each of them.
GATHER_S = 0.03
#: Between two attempts to write where the last one failed.
RETRY_S = 1.0
#: Records that wait to be written before trajectories wait for them.
MAX_WAITING = 1 << 16
#: Bytes after which a frame is closed.
_FRAME = 256 << 10


class JournalWriter:
    """Records in the order in which they were put; each stands in the file whole, or not at all.

    What cannot be written waits, is said once, and is tried again. In virtual time it writes at
    once, on the loop.

    Args:
        path: The file, which is its own from now on.
        descriptor: Of the file, which it closes.
        size: Where the file ends.
        syncs: Whether each batch is on the disk, and not only with the system, before it counts as
            written.
        gather_s: How long records are gathered before they are written together.

    Attributes:
        put_count: Records given so far.
        written: Of these, as many as are written.
        size: Bytes in the file.
        failure: Why the last attempt to write failed; None where it did not.
        listeners: Called on the loop when more is written, or cannot be; see `ask`.
    """

    def __init__(
        self, path: Path, descriptor: int, size: int, *, syncs: bool, gather_s: float = GATHER_S
    ) -> None:
        self._gather_s = gather_s
        self.put_count = self.written = 0
        self.size = size
        self.failure: RolloutError | None = None
        self._path, self._descriptor, self._syncs = path, descriptor, syncs
        #: What records are added to; under the lock, for the thread takes it away.
        self._open, self._lock = OpenFrame(), threading.RLock()
        self._is_together = False
        self._full: deque[OpenFrame] = deque()
        #: What is to be written; the thread's.
        self._closed: deque[OpenFrame] = deque()
        self._event_type = event_type()
        self._changed = self._event_type()
        self.listeners: dict[Callable[[], object], None] = {}
        self._has_waiters = False
        self._is_awake = False
        self._wake, self._closing, self._done = (threading.Event() for _ in range(3))
        self._thread: threading.Thread | None = None
        self._post = loop_poster()
        if not has_virtual_clock():
            self._thread = threading.Thread(target=self._run, name="rollout-journal", daemon=True)
            self._thread.start()

    def begin(self, header: Entry) -> None:
        """The first record of a new file."""
        first = OpenFrame()
        first.buffer[:] = MAGIC
        self._closed.append(first)
        self.put(header)

    def put(self, entry: Entry) -> int:
        """Have a record written; its number. On the loop.

        Raises:
            TypeError, ValueError, OverflowError: It cannot be encoded; nothing has changed.
        """
        with self._lock:
            frame = self._open
            frame.add(entry)
            if len(frame.buffer) > _FRAME and not self._is_together:
                self._full.append(frame)
                self._open = OpenFrame()
        self.put_count += 1
        if self._is_together:
            pass
        elif self._thread is None:
            self._write_all()
        elif not self._is_awake:
            self._is_awake = True
            self._wake.set()
        return self.put_count

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is put in the block is in the file as a whole, or not at all."""
        with self._lock:
            self._is_together = True
            try:
                yield
            finally:
                self._is_together = False
        if self._thread is None:
            self._write_all()
        else:
            self._is_awake = True
            self._wake.set()

    def ask(self) -> None:
        """Have the listeners called when more is written than is now."""
        self._has_waiters = True  # the thread looks for it after it has written

    async def until_written(self, number: int, look_s: float) -> None:
        """Until so many records are written, or it is worth to look whether to wait on.

        Args:
            number: As from `put`.
            look_s: How long to wait where they cannot be written.
        """
        changed, self._has_waiters = self._changed, True
        if self.written >= number:  # the thread looks for waiters after it has written
            return
        if self.failure is None and self._thread is not None:
            await changed.wait()
            return
        with anyio.move_on_after(look_s):
            await changed.wait()

    async def watch(self, look_s: float) -> None:
        """Let those who wait look around now and then, should the disk never answer."""
        while True:
            await anyio.sleep(look_s)
            if self._has_waiters:
                self._tell()

    async def close(self, limit_s: float) -> None:
        """Write what waits, for no longer than this, and close the file; on the loop, shielded."""
        if self._thread is None:
            self._write_all()
        else:
            self._closing.set()
            self._wake.set()
            with anyio.CancelScope(deadline=anyio.current_time() + limit_s, shield=True):
                while not self._done.is_set():
                    await self.until_written(self.put_count + 1, limit_s)
        left = self.put_count - self.written
        if left:
            logger.error(
                "%s; %d records are lost: a resumption works again on them", self._path, left
            )
        if self._thread is None or self._done.is_set():
            os.close(self._descriptor)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(RETRY_S if self._closed else None)
            self._wake.clear()
            self._closing.wait(self._gather_s)
            self._is_awake = False
            self._write_all()
        self._write_all()
        self._done.set()
        self._post(self._tell)

    def _write_all(self) -> None:
        """Write what was put so far."""
        with self._lock:
            if self._open.count:
                self._full.append(self._open)
                self._open = OpenFrame()
        while self._full:
            frame = self._full.popleft()
            frame.close()
            self._closed.append(frame)
        before, failure = self.written, self.failure
        try:
            while self._closed:
                self._write_first()
            self.failure = None
        except Exception as error:  # whatever it is, nobody else would learn of it
            self.failure = unwritable(
                self._path, error, sum(len(each.buffer) for each in self._closed)
            )
            if failure is None:
                logger.warning("%s; it is tried again", self.failure)
        if self._has_waiters and (self.written > before or self.failure is not failure):
            self._has_waiters = False
            if self._thread is None:
                self._tell()
            else:
                self._post(self._tell)

    def _write_first(self) -> None:
        """The next frame, or the first of its records where there is no room for all.

        Raises:
            OSError: There is no room.
        """
        frame = self._closed[0]
        try:
            self._append(frame.buffer)
        except OSError:
            if frame.count <= 1:
                raise
            self._closed.popleft()
            self._closed.extendleft(reversed(frame.divided()))
            frame = self._closed[0]
            self._append(frame.buffer)
        self._closed.popleft()
        self.written += frame.count

    def _append(self, frame: bytearray) -> None:
        """All of a frame, or nothing of it."""
        done = 0
        try:
            with memoryview(frame) as view:
                while done < len(frame):
                    done += os.write(self._descriptor, view[done:])
            if self._syncs:
                os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(frame)

    def _tell(self) -> None:
        """Wake those who wait; on the loop."""
        changed, self._changed = self._changed, self._event_type()
        changed.set()
        for tell in tuple(self.listeners):
            tell()
