"""Keeps what a process has loaded out of Python's full garbage collections.

A full collection looks at every object and stops all threads meanwhile: a fifth of a second where
torch and transformers are loaded, seconds in a large trainer. All engines then wait for the loop.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollout.lazy import importing

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
            # A caller that rules the collector by itself keeps doing so.
            is_disabled = not (gc.isenabled() or importing.is_pausing)
            if self._runtimes > 1 or is_disabled or gc.get_freeze_count():
                return
            if not self._is_swept:  # later ones find little, and each takes as long
                gc.collect()
                self._is_swept = True
            gc.freeze()
            self._is_ours = True

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


_heap = _Heap()


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


def freeze_loaded() -> None:
    """What lives now, too, where one runtime is in its block of `frozen_heap`: it was just loaded.

    Nothing is collected before, which would take a look at all of it.
    """
    _heap.freeze_more()
