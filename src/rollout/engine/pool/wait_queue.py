"""Requests that wait until a replica has room."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import TYPE_CHECKING

import anyio
import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.engine.pool.requests import Request


@attrs.define(order=False, eq=False)
class _Waiter:
    """A request in the queue; `called` fires when it may look for a replica."""

    rank: tuple[int, int]
    called: anyio.Event = attrs.field(factory=anyio.Event)
    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    has_left: bool = False

    def __lt__(self, other: _Waiter) -> bool:
        return self.rank < other.rank


class WaitQueue:
    """Waiting requests by priority, and then in their order.

    The first is called when a replica has room, and calls the next one once it has looked.

    Args:
        has_room: Whether it is worth looking.
    """

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._waiters: list[_Waiter] = []  # a heap; those that have left are still in it
        self._numbers = itertools.count()
        self._deadline = math.inf
        self._count = 0

    def __len__(self) -> int:
        """How many wait, those included that were called and have not looked yet."""
        return self._count

    @property
    def is_closed(self) -> bool:
        """Whether waiting is over."""
        return anyio.current_time() >= self._deadline

    async def wait(self, request: Request) -> bool:
        """Return True when it is the request's turn; False where waiting was ended.

        A caller that does not use its turn calls `call_next`; cancellation passes it on.
        """
        waiter = _Waiter((-request.priority, next(self._numbers)))
        heapq.heappush(self._waiters, waiter)
        self._count += 1
        try:
            waiter.scope.deadline = self._deadline
            with waiter.scope as request.queue_scope:
                await waiter.called.wait()
        except BaseException:
            if waiter.called.is_set():
                self.call_next()
            raise
        finally:
            request.queue_scope, waiter.has_left = None, True
            self._count -= 1
        return waiter.called.is_set()

    def call_next(self) -> None:
        """Call the first one, if there is room."""
        while self._waiters and (self._waiters[0].has_left or self._has_room()):
            waiter = heapq.heappop(self._waiters)
            if not waiter.has_left:
                waiter.called.set()
                return

    def call_all(self) -> None:
        """Let all of them look, because nothing is as it was."""
        for waiter in self._waiters:
            waiter.called.set()
        self._waiters.clear()

    def close_at(self, deadline: float) -> None:
        """End the waiting at this time, also of requests that come later; infinity: never."""
        self._deadline = deadline
        for waiter in self._waiters:
            waiter.scope.deadline = deadline
