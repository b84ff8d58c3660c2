"""Appends records to a journal: a task gathers them and writes them in a thread."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import anyio

from rollout.chat.plain_data import encoder
from rollout.disk_room import unwritable
from rollout.journal.log_file import make_frame
from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from rollout.errors import RolloutError
    from rollout.journal.log_file import LogFile
    from rollout.journal.records import Record

logger = logging.getLogger("rollout.journal")

#: How long records are gathered, and how long where somebody waits for them.
GATHER_S, HURRY_S = 0.2, 0.005
#: Between two attempts to write where the last one failed.
RETRY_S = 1.0
#: How long a waiter waits before it looks at its own limits again.
CHECK_S = 0.2


class JournalWriter:
    """Writes records in the order of `put`. What cannot be written waits, and is tried again.

    Args:
        file: Open for appending; its owner closes it after `close`.
        syncs: Whether each batch is on the disk, and not only with the system, before it counts as
            written.

    Attributes:
        put_count, written: Records given so far, and how many of them are written.
        failure: Why the last attempt to write failed; None where it did not.
        is_closed: Whether nothing more is written.
    """

    def __init__(self, file: LogFile, *, syncs: bool) -> None:
        self.file = file
        self.put_count = self.written = 0
        self.failure: RolloutError | None = None
        self.is_closed = False
        self._syncs = syncs
        self._frames: list[bytes] = []
        self._has_work, self._hurry = anyio.Event(), anyio.Event()
        self._changed, self._closing, self._done = anyio.Event(), anyio.Event(), anyio.Event()

    def put(self, record: Record) -> int:
        """Have a record written; return its number, from 1.

        Raises:
            TypeError, ValueError, OverflowError: It cannot be encoded.
        """
        self._frames.append(make_frame(encoder.encode(record)))
        self.put_count += 1
        if len(self._frames) == 1:
            self._has_work.set()
        return self.put_count

    async def wait(self, number: int) -> None:
        """Wait until so many records are written, or for `CHECK_S`."""
        if self.written < number and not self.is_closed:
            self._hurry.set()
            with anyio.move_on_after(CHECK_S):
                await self._changed.wait()

    async def run(self) -> None:
        """Write what is put, until `close`; shielded."""
        try:
            with anyio.CancelScope(shield=True):
                while not self._closing.is_set():
                    await self._has_work.wait()
                    with anyio.move_on_after(GATHER_S):
                        await self._hurry.wait()
                        await anyio.sleep(HURRY_S)
                    await self._write()
                    if self.failure is not None:
                        with anyio.move_on_after(RETRY_S):
                            await self._closing.wait()
                await self._write()
        finally:
            self._done.set()

    async def _write(self) -> None:
        """Write what was put so far."""
        frames, self._frames = self._frames, []
        self._has_work, self._hurry = anyio.Event(), anyio.Event()
        before, self.failure = self.failure, None
        append = partial(self.file.append, frames, syncs=self._syncs)
        try:
            await run_in_thread(append)
            self.written += len(frames)
        except OSError as error:
            self._frames[:0] = frames
            self._has_work.set()
            self.failure = unwritable(self.file.path, error, sum(map(len, frames)))
            if before is None:
                logger.warning("%s; it is tried again", self.failure)
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def close(self, limit_s: float) -> None:
        """Write what waits, for no longer than this; shielded."""
        self._closing.set()
        self._has_work.set()
        self._hurry.set()
        with anyio.CancelScope(deadline=anyio.current_time() + limit_s, shield=True):
            await self._done.wait()
        left = self.put_count - self.written
        if left:
            logger.error(
                "%s; %d records are lost: a resumption works again on them", self.file.path, left
            )
        self.is_closed = True
        self._changed.set()
