"""Keeps Python's full garbage collections away from the event loop.

A full collection looks at every object and stops all threads meanwhile: a fifth of a second where
torch and transformers are loaded, a second where 10,000 trajectories run. All engines then wait
for the loop. So what a process has loaded is left out of collections, and while a batch runs only
the youngest objects are looked at. Of its own trajectories nothing is lost by that, since what
ends of them is freed without the collector; what agents and tools leave in cycles is found after
the batch, or as soon as memory asks for it.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio

from rollout import process_memory
from rollout.clocks import thread_cpu
from rollout.lazy import importing

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("rollout")

#: The thresholds that Python begins with, in one version or another. Others are a caller's.
PYTHONS_OWN = ((700, 10, 10), (2000, 10, 10), (2000, 10, 0))
#: So many more objects are made than freed, while a batch runs, before the youngest are looked at.
#: Where thousands of trajectories take turns, about as many older ones are freed as are made: at
#: Python's own 700 the youngest gather unseen, and one look at them takes a tenth of a second.
YOUNG = 100
#: So many collections of the younger generation come before one of an older.
NEVER = 1_000_000_000
#: The thresholds while a batch runs.
OURS = (YOUNG, NEVER, NEVER)
#: Memory asks for a collection once a process has grown by this share of what was free before, but
#: by neither less nor more than these bytes.
SHARE, LEAST, MOST = 0.25, 256 << 20, 8 << 30
#: What lives is swept before it is frozen where so many runtimes were opened since the last sweep,
#: or the process has grown to so many times what it was then.
OPENINGS = 32
GROWN = 1.5
#: Seconds between two looks at the process's memory.
LOOK_S = 1.0
#: Seconds between two collections of the youngest objects, while a batch runs: fewest where one
#: took longer than `FEW_S`, and twice as many after each that did not.
YOUNG_S, MOST_YOUNG_S = 0.02, 0.32
FEW_S = 2e-4


class _Heap:
    """The one of this process, which all of its runtimes share."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what a collection under it ends may come here again
        self._runtimes = 0
        self._is_ours = False
        self._openings = 0  # since the last sweep
        self._swept_resident: int | None = None  # bytes after it
        self._batches = 0
        self._callers: tuple[int, int, int] | None = None  # thresholds, while ours stand
        self._last_callers = PYTHONS_OWN[0]
        self._resident = 0
        self._room = 0

    def freeze(self) -> None:
        with self._lock:
            self._runtimes += 1
            if self._runtimes > 1 or _is_disabled() or gc.get_freeze_count():
                return
            self._sweep_if_due()
            gc.freeze()
            self._is_ours = True

    def _sweep_if_due(self) -> None:
        """Collect what runtimes before have left in cycles: once it is frozen, nobody finds it.

        It takes long and finds little, so it is not done each time; to count what there is would
        take as long.
        """
        self._openings += 1
        resident = process_memory.resident_bytes()
        if self._swept_resident is None:
            self._swept_resident = resident
        elif self._openings > OPENINGS or resident > GROWN * self._swept_resident:
            gc.collect()
            self._openings, self._swept_resident = 0, process_memory.resident_bytes()

    def freeze_more(self) -> None:
        with self._lock:
            if self._is_ours and self._runtimes == 1:
                gc.freeze()

    def thaw(self) -> None:
        with self._lock:
            self._runtimes -= 1
            if self._is_ours and not self._runtimes:
                gc.unfreeze()
                self._is_ours = False

    def put_off(self) -> None:
        with self._lock:
            self._batches += 1
            thresholds = gc.get_threshold()
            if self._batches == 1 and thresholds == OURS:  # a caller has read and put them back
                thresholds = self._last_callers
            if self._batches == 1 and not _is_disabled() and thresholds in PYTHONS_OWN:
                self._callers = self._last_callers = thresholds
                gc.set_threshold(*OURS)
                self._note_memory()

    def resume(self) -> None:
        with self._lock:
            self._batches -= 1
            if self._callers is None or self._batches:
                return
            self._restore_thresholds()

    def _restore_thresholds(self) -> None:
        """The caller's, but for those that it has set meanwhile."""
        if self._callers is not None:
            each = zip(gc.get_threshold(), OURS, self._callers, strict=True)
            gc.set_threshold(*(callers if now == ours else now for now, ours, callers in each))
            self._callers = None

    def leave_child(self) -> None:
        """In a process forked from this one, which has none of its runtimes."""
        self._restore_thresholds()
        if self._is_ours:
            gc.unfreeze()
        self.__init__()  # type: ignore[misc]  # its lock may be held by a thread that is not there

    def collect_youngest(self) -> float | None:
        """Look at the youngest objects now; CPU seconds that it took, None: nothing is put off.

        Python does when so many more have come than have gone, of any age. Where each turn frees
        what the last one made, that is seldom, and there are hundreds of thousands then.
        """
        if self._callers is None or not gc.isenabled():
            return None
        began = thread_cpu()
        gc.collect(0)
        return thread_cpu() - began

    def collect_if_due(self) -> None:
        with self._lock:
            grown = process_memory.resident_bytes() - self._resident
            if self._callers is None or not gc.isenabled() or grown < self._room:
                return
        found = gc.collect()  # it runs foreign code, which may come here
        logger.info("collected garbage, since memory had grown by %d bytes: %d", grown, found)
        with self._lock:
            self._note_memory()

    def _note_memory(self) -> None:
        self._resident = process_memory.resident_bytes()
        self._room = int(min(max(SHARE * process_memory.available_bytes(), LEAST), MOST))


def _is_disabled() -> bool:
    """Whether the caller has disabled the collector, and keeps ruling it by itself."""
    return not (gc.isenabled() or importing.is_pausing)


_heap = _Heap()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_heap.leave_child)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Collections do not look at what lives now, until the last such block has been left.

    An object still ends with its last reference. What becomes unreachable in a cycle is found
    after the block. Does nothing where the collector is disabled or something is frozen already.
    """
    _heap.freeze()
    try:
        yield
    finally:
        _heap.thaw()


@contextmanager
def collections_put_off() -> Iterator[None]:
    """Only the youngest objects are looked at, until the last such block has been left.

    `collect_as_memory_asks` looks at the others meanwhile. Does nothing where the collector is
    disabled, or has other thresholds than Python gives it; such as are set within are left alone.
    """
    _heap.put_off()
    try:
        yield
    finally:
        _heap.resume()


async def collect_as_memory_asks() -> None:
    """Until cancelled, collect garbage while it is put off and memory has grown much.

    The youngest objects are looked at often, so that they are few each time.
    """
    next_look, pause_s = anyio.current_time() + LOOK_S, YOUNG_S
    while True:
        took_s = _heap.collect_youngest()
        if took_s is None:
            pause_s = LOOK_S
        else:  # each look is a round of the loop, also where it waits for engines only
            pause_s = YOUNG_S if took_s > FEW_S else min(2 * pause_s, MOST_YOUNG_S)
        await anyio.sleep(pause_s)
        if anyio.current_time() >= next_look:
            _heap.collect_if_due()
            next_look = anyio.current_time() + LOOK_S


def freeze_loaded() -> None:
    """What lives now, too, where one runtime is in its block of `frozen_heap`: it was just loaded.

    Nothing is collected before, which would take a look at all of it.
    """
    _heap.freeze_more()
