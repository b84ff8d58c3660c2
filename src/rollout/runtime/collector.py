"""Keeps Python's full garbage collections rare while a runtime is open.

A full collection looks at every object and stops all threads meanwhile: a fifth of a second where
torch and transformers are loaded, a second where 10,000 trajectories run, and all engines wait for
the loop. So what a process has loaded is left out of collections, and they come less often.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Thresholds that Python begins with, in one version or another. Others are a caller's, and stay.
PYTHONS_OWN = ((700, 10, 10), (2000, 10, 10), (2000, 10, 0))
#: The thresholds while a runtime is open. The middle generation is looked at often: what 10,000
#: trajectories have made meanwhile would stop the loop for a second, in one piece.
SELDOM = (10_000, 5, 20_000)

_lock = threading.Lock()
#: For each open runtime of the process, what gives back what it has changed of the collector.
_undo: list[list[Callable[[], None]]] = []


def _give_back(thresholds: tuple[int, int, int]) -> None:
    if gc.get_threshold() == SELDOM:  # else somebody has set others meanwhile
        gc.set_threshold(*thresholds)


@contextmanager
def collecting_seldom() -> Iterator[Callable[[], None]]:
    """Collect seldom until the last such block of the process has been left.

    Yields what freezes all that lives, to be called once everything has been loaded: an object
    still ends with its last reference, but collections do not look at it. Does nothing where the
    caller has disabled the collector, set thresholds, or frozen something.
    """
    own: list[Callable[[], None]] = []
    with _lock:
        _undo.append(own)
        before = gc.get_threshold()
        if len(_undo) == 1 and gc.isenabled() and before in PYTHONS_OWN:
            gc.set_threshold(*SELDOM)
            own.append(partial(_give_back, before))

    def freeze() -> None:  # not beside another runtime, whose batches end before it
        with _lock:
            if len(_undo) == 1 and gc.isenabled() and not gc.get_freeze_count():
                gc.freeze()
                own.append(gc.unfreeze)

    try:
        yield freeze
    finally:
        with _lock:
            _undo.remove(own)
            if _undo:  # the last one gives all back
                _undo[0][:0] = own
            else:
                for give_back in own:
                    give_back()
