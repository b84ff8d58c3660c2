"""Long work of the runtime's own, in threads beside the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

from rollout.bridge import has_virtual_clock

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: Pieces of work that are done at once; others wait. They share the machine with the event loop.
MAX_THREADS = 2


class LongWork:
    """Threads of their own, so that the runtime's work waits for nobody's.

    In virtual time nothing runs in threads: time would run away from them.
    """

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(MAX_THREADS)

    async def run(self, is_long: bool, function: Callable[[], T]) -> T:
        """``function()``, in a thread where it is long work; cancellation waits for its end."""
        if not is_long or has_virtual_clock():
            return function()
        return await anyio.to_thread.run_sync(function, limiter=self._limiter)
