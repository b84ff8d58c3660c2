"""Virtual time held still while something real works."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import trio.lowlevel
import trio.testing

from rollout.worker_threads import thread_entry

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Hold:
    """How many blocks hold a clock, and what it did before."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.count = 0


_holds: WeakKeyDictionary[trio.testing.MockClock, _Hold] = WeakKeyDictionary()


@contextmanager
def hold_clock(clock: trio.testing.MockClock | None = None) -> Iterator[None]:
    """Virtual time stands still within the block; put it around anything real.

    trio's autojump clock leaps to the next deadline whenever every task waits, and it cannot see
    that a thread, a socket or a child process is at work: timeouts then fire at once. Within the
    block it does not jump, so no deadline fires and no sleep ends; time continues where it stood
    when the block is left. Blocks may nest and overlap: the last one to leave lets time go. A
    clock with a rate of its own keeps it. Where time is real, as on asyncio, nothing changes.

    Args:
        clock: The clock to hold; None takes that of the running loop.
    """
    held = clock if clock is not None else _running_clock()
    if held is None:
        yield
        return
    hold = _holds.setdefault(held, _Hold(held.autojump_threshold))
    hold.count += 1
    held.autojump_threshold = math.inf
    try:
        yield
    finally:
        hold.count -= 1
        if hold.count == 0:
            del _holds[held]
            held.autojump_threshold = hold.threshold


@contextmanager
def virtual_threads(*, holds: bool = True) -> Iterator[None]:
    """Within the block, work of the library's own stays on the loop, and virtual time stands still.

    It would run away from threads.

    Args:
        holds: Whether it stands still while a sync tool or reward runs in its thread.
    """
    before = vars(thread_entry).copy()
    thread_entry.is_open, thread_entry.waiting = False, hold_clock if holds else nullcontext
    try:
        yield
    finally:
        vars(thread_entry).update(before)


class VirtualClock:
    """The clock of a test in virtual time, as the fixture `rollout_clock` gives it.

    Attributes:
        mock: The clock that trio runs on; it starts at 0 and jumps to the next deadline whenever
            every task waits.
    """

    def __init__(self) -> None:
        self.mock = trio.testing.MockClock(autojump_threshold=0)

    @property
    def now(self) -> float:
        """Virtual seconds since the start; `anyio.current_time()` within the test."""
        return self.mock.current_time()

    def jump(self, seconds: float) -> None:
        """Let `seconds` pass at once; whatever is due by then happens at the next checkpoint."""
        self.mock.jump(seconds)

    def hold(self) -> Any:
        """`hold_clock` for this clock."""
        return hold_clock(self.mock)


def _running_clock() -> trio.testing.MockClock | None:
    if not trio.lowlevel.in_trio_run():
        return None
    clock = trio.lowlevel.current_clock()
    return clock if isinstance(clock, trio.testing.MockClock) else None
