"""Operations on all replicas of a pool, one at a time; a caller's cancellation stops none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup


class MaintenanceQueue:
    """Runs operations in a task group of the pool, so that no caller's cancellation halves them."""

    def __init__(self) -> None:
        self._tasks: TaskGroup | None = None
        self._one_at_a_time = anyio.Lock()

    def open(self, tasks: TaskGroup) -> None:
        """Run operations in this group from now on."""
        self._tasks = tasks

    def close(self) -> None:
        """Run none from now on; the end of the group ends those that are under way."""
        self._tasks = None

    async def do(self, work: Callable[[], Awaitable[None]]) -> None:
        """Return when `work` is done; cancellation leaves the engines to it.

        Raises:
            EngineError: It failed, or the engines were closed.
            Exception: What `work` raised.
        """
        if self._tasks is None:
            raise EngineError("the engines are closed")
        job = _Job(work)
        self._tasks.start_soon(job.run, self._one_at_a_time)
        await job.done.wait()
        if job.error is not None:
            raise job.error


class _Job:
    """One operation: `done` fires when it is over, `error` then says why it failed."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self.done = anyio.Event()
        self.error: Exception | None = None
        self._work = work

    async def run(self, lock: anyio.Lock) -> None:
        try:
            async with lock:
                await self._work()
        except Exception as error:  # whatever it is, it is the caller's, and the engines stay
            self.error = error
        except BaseException:
            self.error = EngineError("the engines were closed meanwhile")
            raise
        finally:
            self.done.set()
