"""Ends pieces of code at their deadlines: one heap and one task for all of them."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

#: Ended pieces of code that the heap may hold, beside as many as are running.
_SPARE = 64


class Expiring:
    """A piece of code with a deadline.

    Attributes:
        expires_at: When `Expiries` looks at it next, which alone changes that; infinite for never.
    """

    __slots__ = ("expires_at",)

    def __init__(self) -> None:
        self.expires_at = math.inf

    def __lt__(self, other: Expiring) -> bool:
        return self.expires_at < other.expires_at

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return False

    def expire(self, now: float) -> None:
        """Its time may have come."""


class Expiries:
    """Looks at each piece of code when its deadline has come.

    The heap is of the pieces themselves. As trio keeps the deadlines of scopes, each would cost a
    tuple too.

    Args:
        clock: The loop's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[Expiring] = []
        self._is_ordered = True
        self._ended = 0
        self._alarm: anyio.CancelScope | None = None

    def expect(self, work: Expiring, at: float) -> None:
        """Have it `expire` at that time, or earlier where that was said before."""
        before, work.expires_at = work.expires_at, min(at, work.expires_at)
        if at >= before:
            return  # never; or it is looked at before, and says then when to look again
        if before < math.inf:
            self._is_ordered = False
        elif self._is_ordered:
            heappush(self._heap, work)
        else:
            self._heap.append(work)
        if self._alarm is not None and at < self._alarm.deadline:
            self._alarm.deadline = at

    def note_end(self) -> None:
        """A piece of code has ended."""
        self._ended += 1
        if self._ended > len(self._heap) // 2 + _SPARE:
            self._heap = [work for work in self._heap if not work.is_over]
            self._is_ordered, self._ended = False, 0

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                with anyio.CancelScope(deadline=self._first()) as self._alarm:
                    await anyio.sleep_forever()
                self._expire(self._clock())
        finally:
            self._heap.clear()  # what is in it refers to what this is of

    def _expire(self, now: float) -> None:
        while self._first() <= now:
            work = heappop(self._heap)
            work.expires_at = math.inf
            if not work.is_over:
                work.expire(now)

    def _first(self) -> float:
        """When to look next."""
        if not self._is_ordered:
            heapify(self._heap)
            self._is_ordered = True
        return self._heap[0].expires_at if self._heap else math.inf
