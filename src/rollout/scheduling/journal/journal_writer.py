"""Appends records to a journal, in batches, in a thread beside the event loop."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import contextmanager, suppress
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import anyio

from rollout.bridge import loop_poster
from rollout.clocks import monotonic
from rollout.disk_room import unwritable
from rollout.scheduling.journal.foreign_changes import foreign_change
from rollout.scheduling.journal.frames import MAGIC, FrameBuffer
from rollout.scheduling.journal.held_files import let_go
from rollout.scheduling.journal.large_records import single_frames
from rollout.worker_threads import may_leave_loop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rollout.errors import RolloutError
    from rollout.scheduling.journal.entries import Entry

logger = logging.getLogger("rollout.journal")

#: How long records are gathered where nobody waits for them.
GATHER_S = 0.2
#: The same where a caller waits for a trajectory, and where a program waits for an answer.
_HURRY_S, SOON_S = 0.03, 0.002
#: After which part of such a time a busy loop has them written, and how long it waits for that; see
#: `JournalWriter._hand_over`.
_EARLY, _HAND_OVER_S = 0.75, 0.002
#: Between two attempts to write where the last one failed.
RETRY_S = 1.0
#: Records that wait to be written before trajectories wait for them.
MAX_WAITING = 1 << 16
#: Records after which they are encoded, into a frame.
_BATCH = 64
#: Frames that the system writes at once.
_AT_ONCE = 1 << 9
#: Frames whose memory is kept, unless it is of more bytes: that of a film is too much.
_SPARE, _MOST_KEPT = 32, 1 << 20
#: What a record that is no plain data raises.
_UNENCODABLE = (TypeError, ValueError, OverflowError)


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
        allowance: As the attribute.

    Attributes:
        put_count: Records given so far.
        written: Of these, as many as are written.
        allowance: How many records may wait to be written before trajectories wait for them.
        admitted: The number up to which records are put without waiting.
        size: Bytes in the file.
        failure: Why the last attempt to write failed; None where it did not.
        is_closed: Whether nothing more is written.
        sealed: As many records as change no more; others may where `is_amending` is set meanwhile.
        is_amending: Whether one is being changed, on the loop.
    """

    def __init__(
        self,
        path: Path,
        descriptor: int,
        size: int,
        *,
        syncs: bool,
        gather_s: float,
        allowance: int,
    ) -> None:
        self._gather_s, self.allowance = gather_s, allowance
        self.put_count = self.written = 0
        self.admitted = allowance
        self.size = size
        self.sealed, self.is_amending = 0, False
        self.failure: RolloutError | None = None
        self.is_closed = False
        self._path, self._descriptor, self._syncs = path, descriptor, syncs
        self._place, self._is_foreign, self._is_torn = path.absolute(), False, False
        #: Records that are to be encoded: one by one that costs twice as much. Under the lock, for
        #: the thread does so as well, they are taken from here into what is to be written.
        self._put: list[Entry] = []
        #: With this number there is more to do than to put: 0 while the thread idles, else where a
        #: batch is whole. One look at it is all that most records cost.
        self._due = 0
        self._lock = threading.RLock()
        self._encoded = 0
        self._is_together = False
        #: What is to be written, and what was.
        self._full: deque[FrameBuffer] = deque()
        self._spare: deque[FrameBuffer] = deque(maxlen=_SPARE)
        self._changed = anyio.Event()
        self._has_waiters = False
        #: Whether the thread will look by itself at what is put; whether it waits until then, and
        #: from when on it may be told to look now.
        self._is_awake = self._is_gathering = False
        self._ready_at = 0.0
        #: Free once the thread has written what it was told to; see `_hand_over`.
        self._handed_over = threading.Lock()
        #: What wakes the thread: something was put while it idled, or somebody waits, for so long.
        self._signals: SimpleQueue[float] = SimpleQueue()
        self._within_s = gather_s
        self._closing, self._done = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._post = loop_poster()
        if may_leave_loop():
            self._thread = threading.Thread(target=self._run, name="rollout-journal", daemon=True)
            self._thread.start()

    def put(self, entry: Entry) -> int:
        """Have a record written; its number. On the loop.

        Args:
            entry: It is encoded later: nothing in it may change, and it must be plain data.
        """
        self.put_count = number = self.put_count + 1  # first: what is written is never more
        self._put.append(entry)
        if number >= self._due:
            self._attend()
        return number

    def put_large(self, entry: Entry) -> int:
        """The same of one that may be of megabytes, which do not wait to be encoded."""
        number = self.put(entry)
        self._encode_now()
        return number

    def _attend(self) -> None:
        """See whether a batch is whole, and whether the thread is to do something."""
        if len(self._put) >= _BATCH:
            self._encode_now()
        if not self._is_awake:
            self._awake()
        elif self._is_gathering and monotonic() >= self._ready_at and not self._is_together:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the thread write what there is, and wait for that as long as a disk in order takes.

        A thread that waits for the interpreter's lock is woken each time that the loop lets go of
        it in a call of the system, and is too late as a rule: that costs both of them half a
        millisecond until it has its turn. While the loop waits there is nobody to wait for.
        """
        self._is_gathering = False
        self._handed_over.acquire(blocking=False)
        self._signals.put(0.0)
        self._handed_over.acquire(timeout=_HAND_OVER_S)

    def _encode_now(self) -> None:
        """Encode what was put, unless it is to be one batch with what follows."""
        if not self._is_together:
            with self._lock, suppress(*_UNENCODABLE):
                self._encode()

    def _encode(self, *, is_whole: bool = False) -> None:
        """What was put is in a frame then; with the lock.

        Raises:
            TypeError, ValueError, OverflowError: A record of ours is no plain data: nothing has
                changed, and the thread says so.
        """
        count = len(self._put)  # the loop may add more meanwhile
        if count:
            self.sealed = self._encoded + count
            while self.is_amending:  # in the thread: for the few steps that the loop takes
                pass
            frame = self._spare.pop() if self._spare else FrameBuffer()
            frame.fill(self._put[:count], is_whole=is_whole)
            if frame.is_too_large:
                self._full.extend(single_frames(self._put[:count]))
            else:
                self._full.append(frame)
            del self._put[:count]
            self._encoded += count
            if self._thread is not None:
                self._due = self._encoded + _BATCH

    def _awake(self) -> None:
        if self._thread is not None:
            self._is_awake = True
            self._signals.put(self._gather_s)
        elif not self._is_together:
            self._write_all()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is put in the block is in the file as a whole, or not at all."""
        with self._lock:
            self._encode_now()
            self._is_together = True
            try:
                yield
            finally:
                self._is_together = False
                with suppress(*_UNENCODABLE):
                    self._encode(is_whole=True)
        if self._thread is None:
            self._write_all()

    def hurry(self, within_s: float = SOON_S) -> None:
        """Gather for no longer than this before what was put is written."""
        if within_s < self._within_s:
            self._within_s = within_s
            self._signals.put(within_s)

    async def until_written(
        self, number: int, look_s: float, *, within_s: float = _HURRY_S
    ) -> None:
        """Until so many records are written, or it is worth to look whether to wait on.

        Args:
            number: As from `put`.
            look_s: How long to wait where they cannot be written.
            within_s: How long more records are gathered at most.
        """
        changed, self._has_waiters = self._changed, True
        if self.written >= number:  # the thread looks for waiters after it has written
            return
        if self.failure is None and self._thread is not None:
            self.hurry(within_s)
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
            self._signals.put(0.0)
            with anyio.CancelScope(deadline=anyio.current_time() + limit_s, shield=True):
                while not self._done.is_set():
                    await self.until_written(self.put_count + 1, limit_s)
        left = self.put_count - self.written
        if left:
            logger.error(
                "%s; %d records are lost: a resumption works again on them", self._path, left
            )
        if self._thread is None or self._done.is_set():
            let_go(self._descriptor)
            os.close(self._descriptor)
        self.is_closed = True
        self._tell()

    def _run(self) -> None:
        is_busy = False
        while not self._closing.is_set():
            if self.failure is None:
                self._gather(is_busy=is_busy)
            else:
                self._closing.wait(RETRY_S)
            self._within_s, before = self._gather_s, self.written
            self._look()
            self._write_all()
            is_busy = self.written > before
            with suppress(RuntimeError):  # nobody handed over
                self._handed_over.release()
        self._write_all()
        self._done.set()
        self._post(self._tell)

    def _gather(self, *, is_busy: bool) -> None:
        """Until something was put, and time for more has passed.

        Args:
            is_busy: Whether more will be put, as far as is known: then it is not waited for.
        """
        within_s = self._gather_s
        if not is_busy:
            self._is_awake, self._due = False, 0
            if not (self._put or self._full):
                within_s = self._signals.get()  # whatever is put from here on sends one
            self._is_awake = True
        self._ready_at = monotonic() + _EARLY * within_s
        self._is_gathering = not self._syncs  # to wait for a disk takes longer
        with suppress(Empty):
            while within_s > 0:
                within_s = min(within_s, self._signals.get(timeout=within_s))
        self._is_gathering = False

    def _look(self) -> None:
        """Say once what others have done to the file: nothing here would fail by it."""
        if not self._is_foreign and self.failure is None:
            change = foreign_change(self._place, self._descriptor, self.size)
            if change is not None:
                self._is_foreign = True
                logger.error("%s %s", self._path, change)

    def _write_all(self) -> None:
        """Write what was put so far."""
        if self.is_closed:
            return
        before, failure = self.written, self.failure
        try:
            with self._lock:
                self._encode()
            if not self.size:
                self._append([MAGIC])
            self._write_full()
            self.failure = None
        except Exception as error:  # whatever it is, nobody else would learn of it
            self.failure = unwritable(self._path, error, sum(map(len, [*self._full])))
            if failure is None:
                logger.warning("%s; it is tried again", self.failure)
        if self._has_waiters and (self.written > before or self.failure is not failure):
            self._has_waiters = False
            if self._thread is None:
                self._tell()
            else:
                self._post(self._tell)

    def _write_full(self) -> None:
        """All frames, many at once; where not all have room, one by one, and then by records.

        Raises:
            OSError: There is none for the next record.
        """
        most = _AT_ONCE
        while self._full:
            frames = [*islice(self._full, most)]
            try:
                self._append([part for each in frames for part in (each.head, each.payload)])
            except OSError:
                if most > 1:
                    most = 1
                    continue
                parts = frames[0].divided()
                if len(parts) < 2:
                    raise
                self._full.popleft()
                self._full.extendleft(reversed(parts))
                continue
            for each in frames:
                self._full.popleft()
                self.written += each.count
                if len(each) < _MOST_KEPT:
                    self._spare.append(each)
            self.admitted = self.written + self.allowance

    def _append(self, parts: Sequence[bytes | bytearray]) -> None:
        """All of some parts, or nothing of them."""
        size = sum(map(len, parts))
        try:
            if self._is_torn:
                os.ftruncate(self._descriptor, self.size)
            self._is_torn = True
            done = os.writev(self._descriptor, parts)
            while done < size:  # as a rule there is no room, and this says so
                done += os.write(self._descriptor, b"".join(parts)[done:])
            if self._syncs:
                os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self.size)  # where that fails too, the next one does it
            raise
        self._is_torn = False
        self.size += size

    def _tell(self) -> None:
        """Wake those who wait; on the loop."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
