"""CPU of a process, of its loop's thread and of other processes, and how long the loop stalls."""

from __future__ import annotations

import os
import time  # noqa: TID251  (what is measured here)
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

#: Between two ticks.
TICK_S = 0.005
#: Steps of the calibration.
STEPS = 60_000


class Ticker:
    """The longest CPU time of the loop's thread between two ticks.

    CPU time and not wall: other programs on the machine do not count.
    """

    def __init__(self, sleep: Callable[[float], Awaitable[object]]) -> None:
        self._sleep = sleep
        self._ticked_at = self._marked_at = time.thread_time()
        self._longest_s = self._longest_since_mark_s = 0.0

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self._ticked_at = time.thread_time()
            await self._sleep(TICK_S)
            self._note()

    def begin(self) -> None:
        """Forget what was before."""
        self._ticked_at, self._longest_s = time.thread_time(), 0.0

    def mark(self) -> None:
        """Begin a second measurement, which leaves the first one as it is."""
        self._marked_at, self._longest_since_mark_s = time.thread_time(), 0.0

    def longest_ms(self) -> float:
        """Since `begin`, what has not ended yet included."""
        self._note()
        return self._longest_s * 1e3

    def longest_since_mark_ms(self) -> float:
        """The same since `mark`."""
        self._note()
        return self._longest_since_mark_s * 1e3

    def _note(self) -> None:
        now = time.thread_time()
        self._longest_s = max(self._longest_s, now - self._ticked_at)
        since = max(self._ticked_at, self._marked_at)
        self._longest_since_mark_s = max(self._longest_since_mark_s, now - since)


class Clocks:
    """What has been used since it was made.

    Args:
        engines: Processes whose CPU is counted apart.
    """

    def __init__(self, engines: tuple[int, ...] = ()) -> None:
        self._engines = engines
        self._begun = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        engine_s = sum(map(_cpu_s_of, self._engines))
        return time.process_time(), time.thread_time(), engine_s, time.perf_counter()

    def per(self, count: int = 1) -> dict[str, float]:
        """Milliseconds for each: of this process, of this thread, of the engines; wall."""
        names = ("cpu_ms", "loop_ms", "engine_ms", "wall_ms")
        spent = [now - then for now, then in zip(self._now(), self._begun, strict=True)]
        return {name: s / count * 1e3 for name, s in zip(names, spent, strict=True)}


def _cpu_s_of(pid: int) -> float:
    """CPU seconds of another process, all threads, as Linux's scheduler counts them."""
    total = 0.0
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                total += int(file.read().split()[0]) / 1e9
        except OSError:  # it ended meanwhile
            continue
    return total


def rss_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def calibration_ms() -> float:
    """CPU of a fixed piece of Python, the best of five: tells a slow machine from slow code."""
    times, seen = [], {}
    for _ in range(5):
        begun = time.thread_time()
        for step in range(STEPS):
            seen[step & 1023] = (step, str(step))
        times.append(time.thread_time() - begun)
    return min(times) * 1e3
