"""Keeps Python's full garbage collections rare while a runtime is open.

A full collection looks at every object and stops all threads meanwhile: a fifth of a second where
torch and transformers are loaded, a second where 10,000 trajectories run, and all engines wait for
the loop. So what a process has loaded is left out of collections, and they come less often.
"""

from __future__ import annotations

import gc
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Thresholds that Python begins with, in one version or another. Others are a caller's, and stay.
PYTHONS_OWN = ((700, 10, 10), (2000, 10, 10), (2000, 10, 0))
#: The thresholds while a runtime is open. The middle generation is looked at with every second
#: collection: what 10,000 trajectories have made since would stop the loop for long, in one piece.
SELDOM = (5_000, 0, 20_000)

_lock = threading.Lock()
#: The open runtimes of the process, and what undoes their changes once there are none.
_runtimes: list[object] = []
_undo = ExitStack()


def _restore_thresholds(thresholds: tuple[int, int, int]) -> None:
    if gc.get_threshold() == SELDOM:  # else somebody has set others meanwhile
        gc.set_threshold(*thresholds)


@contextmanager
def collecting_seldom(*, is_wanted: bool) -> Iterator[Callable[[], None]]:
    """Collect seldom until the last such block of the process has been left.

    Yields what freezes all that lives, to be called once everything has been loaded: an object
    still ends with its last reference, but collections do not look at it. Does nothing where the
    caller has disabled the collector, set thresholds, or frozen something.
    """
    runtime = object()

    def is_alone() -> bool:
        return _runtimes == [runtime] and gc.isenabled()

    def freeze() -> None:
        with _lock:  # not beside another runtime, whose batches end before it
            if is_alone() and not gc.get_freeze_count():
                gc.freeze()
                _undo.callback(gc.unfreeze)

    if not is_wanted:
        yield lambda: None
        return
    with _lock:
        _runtimes.append(runtime)
        before = gc.get_threshold()
        if is_alone() and before in PYTHONS_OWN:
            gc.set_threshold(*SELDOM)
            _undo.callback(_restore_thresholds, before)
    try:
        yield freeze
    finally:
        with _lock:
            _runtimes.remove(runtime)
            if not _runtimes:
                _undo.close()
