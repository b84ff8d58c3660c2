"""Whether a server still lives: while a call waits for it, it must send something now and then."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator


class Liveness:
    """What is known of a server's life; owns no task.

    A server that works need not speak, but it must answer a ping. It is asked for one when a call
    has waited for `ping_s` in which nothing was heard, and when a call was given up; where it is
    silent for another `ping_s`, it is frozen.

    Args:
        ping_s: Seconds; infinite where no server is ever taken for frozen.
    """

    def __init__(self, ping_s: float) -> None:
        self._ping_s = ping_s
        self._heard_at = -math.inf
        self._asked_at: dict[object, float] = {}
        self._was_given_up = False
        self._changed = anyio.Event()

    def hear(self) -> None:
        """The server said something."""
        self._heard_at = anyio.current_time()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A call is under way; where it is cancelled, the server may be the reason."""
        call = object()
        self._asked_at[call] = anyio.current_time()
        self._changed.set()
        try:
            yield
        except anyio.get_cancelled_exc_class():
            self._was_given_up = True
            self._changed.set()
            raise
        finally:
            del self._asked_at[call]

    async def stop(self, ping: Callable[[], Awaitable[object]]) -> None:
        """Return once the server is frozen.

        Args:
            ping: Asks it for an answer, and returns when it has come.
        """
        while True:
            await self._doubt()
            asked_at = anyio.current_time()
            with anyio.move_on_after(self._ping_s):
                await ping()
                continue
            if self._heard_at < asked_at:
                return

    async def _doubt(self) -> None:
        """Wait until there is reason to ask the server."""
        while not self._was_given_up:
            since = max(min(self._asked_at.values(), default=math.inf), self._heard_at)
            if anyio.current_time() >= since + self._ping_s:
                break
            self._changed = anyio.Event()
            with anyio.CancelScope(deadline=since + self._ping_s):
                await self._changed.wait()
        self._was_given_up = False
