"""Keeps Python's full garbage collections rare while a runtime is open.

A full collection looks at every object and stops all threads meanwhile: a fifth of a second where
torch and transformers are loaded, a second where 10,000 trajectories run, and all engines wait for
the loop. So what a process has loaded is left out of collections, and they come less often.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Thresholds that Python begins with, in one version or another. Others are a caller's, and stay.
PYTHONS_OWN = ((700, 10, 10), (2000, 10, 10), (2000, 10, 0))
#: The thresholds while a runtime is open.
SELDOM = (50_000, 20, 1000)


class _Collector:
    """What the open runtimes of this process have changed of the collector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runtimes = 0
        self._callers: tuple[int, int, int] | None = None
        self._is_frozen = False

    def relax(self) -> None:
        with self._lock:
            self._runtimes += 1
            if self._runtimes == 1 and gc.isenabled() and gc.get_threshold() in PYTHONS_OWN:
                self._callers = gc.get_threshold()
                gc.set_threshold(*SELDOM)

    def freeze(self) -> None:
        """Where another runtime is open, its batches are alive, and end without it: nothing."""
        with self._lock:
            if self._runtimes == 1 and gc.isenabled() and not gc.get_freeze_count():
                gc.freeze()
                self._is_frozen = True

    def restore(self) -> None:
        with self._lock:
            self._runtimes -= 1
            if self._runtimes:
                return
            if self._callers is not None and gc.get_threshold() == SELDOM:  # else they are new ones
                gc.set_threshold(*self._callers)
            if self._is_frozen:
                gc.unfreeze()
            self._callers, self._is_frozen = None, False


_collector = _Collector()


@contextmanager
def collecting_seldom() -> Iterator[Callable[[], None]]:
    """Collect seldom until the last such block of the process has been left.

    Yields what freezes all that lives, to be called once everything has been loaded: an object
    still ends with its last reference, but collections do not look at it. Does nothing where the
    caller has disabled the collector, set thresholds, or frozen something.
    """
    _collector.relax()
    try:
        yield _collector.freeze
    finally:
        _collector.restore()
