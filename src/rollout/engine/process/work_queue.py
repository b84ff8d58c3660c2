"""Requests of one client that run side by side, at no more task switches than they need."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

    from rollout.engine.process.running import Running

#: Tasks that wait for a request; more than ever answer at once end when they have nothing to do.
IDLE_WORKERS = 64


class WorkQueue:
    """Workers take requests from a queue.

    One that has to wait within the core is followed by another, so that requests run side by side,
    while a core that answers at once needs no task switch for each of them.

    Args:
        work: Runs one request to its end.
    """

    def __init__(self, work: Callable[[Running], Awaitable[None]]) -> None:
        self._work_on = work
        self._waiting: deque[Running] = deque()
        self._idle: list[anyio.Event] = []
        self._is_awake = False
        self._tasks: TaskGroup | None = None

    def open(self, tasks: TaskGroup) -> None:
        """Workers run in `tasks` from here on."""
        self._tasks = tasks

    def close(self) -> None:
        """No further worker starts."""
        self._tasks = None

    def add(self, running: Running) -> None:
        """Have a request run soon, after those that were added before."""
        self._waiting.append(running)
        if not self._is_awake:
            self._wake()

    def _wake(self) -> None:
        """Have a task look at the queue; for when none is about to."""
        if self._tasks is None:
            return
        self._is_awake = True
        if self._idle:
            self._idle.pop().set()
        else:
            self._tasks.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            self._is_awake = False
            while self._waiting:
                running = self._waiting.popleft()
                if self._waiting and not self._is_awake:
                    self._wake()  # for the others, should this one have to wait
                await self._work_on(running)
            if len(self._idle) >= IDLE_WORKERS:
                return
            woken = anyio.Event()
            self._idle.append(woken)
            await woken.wait()
