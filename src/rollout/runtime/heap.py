"""Keeps what a process has loaded out of Python's full garbage collections.

A full collection looks at every object and stops all threads meanwhile: a fifth of a second where
torch and transformers are loaded, seconds in a large trainer. All engines then wait for the loop.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Heap:
    """The one of this process, which all of its runtimes share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runtimes = 0
        self._is_ours = False
        self._is_swept = False

    def freeze(self) -> None:
        with self._lock:
            self._runtimes += 1
            if self._runtimes > 1 or _is_callers():
                return
            self._sweep()
            gc.freeze()
            self._is_ours = True

    def sweep(self) -> None:
        with self._lock:
            if not _is_callers():
                self._sweep()

    def _sweep(self) -> None:
        if not self._is_swept:  # later ones find little, and each takes as long
            gc.collect()
            self._is_swept = True

    def thaw(self) -> None:
        with self._lock:
            self._runtimes -= 1
            if self._is_ours and not self._runtimes:
                gc.unfreeze()
                self._is_ours = False


_heap = _Heap()


def _is_callers() -> bool:
    """Whether the caller rules the collector by itself, and is to keep doing so."""
    return not gc.isenabled() or gc.get_freeze_count() > 0


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


def sweep_heap() -> None:
    """Collect what is garbage before libraries are loaded, once in a process.

    `frozen_heap` would do it afterwards, when there are several times as many objects to look at.
    """
    _heap.sweep()


@contextmanager
def paused_collector() -> Iterator[None]:
    """No collections inside: a quarter of the time that large libraries take to load is theirs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
