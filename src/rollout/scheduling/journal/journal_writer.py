"""Appends records to a journal, in batches, in a thread beside the event loop."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import anyio

from rollout.bridge import event_type, has_virtual_clock, loop_poster
from rollout.disk_room import unwritable
from rollout.scheduling.journal.frames import MAGIC, divided, frame_into

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
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
#: Bytes of one write; records of one frame, during whose encoding no other thread runs.
_AT_ONCE, _IN_FRAME = 4 << 20, 64


class _Size(NamedTuple):
    """Of a frame."""

    bytes: int
    records: int


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
        self._entries: deque[Entry] = deque()
        #: Of entries that were taken from there, and are not written yet; the thread's.
        self._frames = bytearray()
        self._sizes: deque[_Size] = deque()
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
        self._frames += MAGIC
        self._sizes.append(_Size(len(MAGIC), 0))
        self.put(header)

    def put(self, entry: Entry) -> int:
        """Have a record written; its number. On the loop; nothing of it may change afterwards."""
        self._entries.append(entry)
        self.put_count += 1
        if self._thread is None:
            self._write_all()
        elif not self._is_awake:
            self._is_awake = True
            self._wake.set()
        return self.put_count

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
            self._wake.wait(RETRY_S if self._sizes else None)
            self._wake.clear()
            self._closing.wait(self._gather_s)
            self._is_awake = False
            self._write_all()
        self._write_all()
        self._done.set()
        self._post(self._tell)

    def _write_all(self) -> None:
        """Write what was put so far."""
        while self._entries:
            self._take([self._entries.popleft() for _ in range(min(len(self._entries), _IN_FRAME))])
        before, failure = self.written, self.failure
        try:
            while self._sizes:
                self._write_some()
            self.failure = None
        except Exception as error:  # whatever it is, nobody else would learn of it
            self.failure = unwritable(self._path, error, len(self._frames))
            if failure is None:
                logger.warning("%s; it is tried again", self.failure)
        if self._has_waiters and (self.written > before or self.failure is not failure):
            self._has_waiters = False
            if self._thread is None:
                self._tell()
            else:
                self._post(self._tell)

    def _take(self, entries: Sequence[Entry]) -> None:
        """Encode records in their place."""
        before = len(self._frames)
        frame_into(self._frames, entries)
        self._sizes.append(_Size(len(self._frames) - before, len(entries)))

    def _write_some(self) -> None:
        """The next frames, or as many of their records as there is room for.

        Raises:
            OSError: Not all of them.
        """
        size = count = 0
        for each in self._sizes:
            if count and size + each.bytes > _AT_ONCE:
                break
            size, count = size + each.bytes, count + 1
        try:
            self._append(size, count)
        except OSError:
            first = self._sizes[0]
            if count == 1 and first.records <= 1:
                raise
            self._divide(first)
            self._append(self._sizes[0].bytes, 1)  # perhaps there is room for some

    def _divide(self, first: _Size) -> None:
        """Give each record of the first frame one of its own."""
        if first.records > 1:
            self._sizes.popleft()
            singles = divided(self._frames[: first.bytes])
            self._frames[: first.bytes] = b"".join(singles)
            self._sizes.extendleft(_Size(len(each), 1) for each in reversed(singles))

    def _append(self, size: int, count: int) -> None:
        """So many bytes of the next frames, which are so many; or nothing of them."""
        try:
            with memoryview(self._frames) as view:
                done = 0
                while done < size:
                    done += os.write(self._descriptor, view[done:size])
            if self._syncs:
                os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self.size)
            raise
        del self._frames[:size]
        self.size += size
        self.written += sum(self._sizes.popleft().records for _ in range(count))

    def _tell(self) -> None:
        """Wake those who wait; on the loop."""
        changed, self._changed = self._changed, self._event_type()
        changed.set()
        for tell in tuple(self.listeners):
            tell()
