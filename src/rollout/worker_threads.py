"""Daemon threads for sync code of users, which may not come back."""

from __future__ import annotations

import inspect
import queue
import sys
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from rollout.bridge import AsyncioThread, loop_poster, take_result
from rollout.errors import ToolError
from rollout.scopes import give_back
from rollout.wait_places import thread_frames

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from types import FrameType

T = TypeVar("T")

#: An idle worker thread ends after this long; an active batch reuses threads far sooner.
IDLE_S = 10.0
#: How long code on the asyncio thread has to end once it was cancelled; as limits.cleanup_s.
ASYNCIO_CLEANUP_S = 5.0
#: Of the task that asks, seen by the function in its thread.
carried: ContextVar[Any] = ContextVar("rollout_carried", default=None)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives an awaitable; callable objects count by their `__call__`."""
    call = getattr(function, "__call__", function)  # noqa: B004  (the method itself is wanted)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


class _Worker:
    """A daemon thread that serves one job after another."""

    def __init__(self, idle: list[_Worker]) -> None:
        self._idle = idle
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollout-worker", daemon=True)
        self._thread.start()

    def frames(self) -> list[FrameType]:
        """Where it is, from the outermost frame in."""
        return thread_frames(sys._current_frames().get(self._thread.ident or 0))

    def _run(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=IDLE_S)
            except queue.Empty:
                try:
                    self._idle.remove(self)  # no job can be handed to us from here on
                except ValueError:
                    continue  # taken out a moment ago: its job is on the way
                return
            if job is None:
                return
            job()
            del job  # else what it was called with stays until the next one


class WorkerThreads:
    """Daemon threads for sync tools and sync reward functions, and one with a loop of asyncio's.

    A call that is cancelled abandons its thread: the place in the pool is given back at once, the
    thread runs on until its function returns, and it delays neither `close` nor the exit of the
    process. Abandoned threads are counted by name; past `max_abandoned` a name fails fast.

    Args:
        watch: Runs on the loop of `run_asyncio`'s thread, for as long as that does.
    """

    def __init__(
        self,
        *,
        max_threads: int,
        max_abandoned: int,
        watch: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._limiter = anyio.CapacityLimiter(max_threads)
        self._asyncio = AsyncioThread(cleanup_s=ASYNCIO_CLEANUP_S, watch=watch)
        self._max_abandoned = max_abandoned
        self._idle: list[_Worker] = []
        self._abandoned: dict[str, int] = {}
        self._is_closed = False

    @property
    def abandoned(self) -> dict[str, int]:
        """Threads left behind and still running, by name."""
        counts = Counter(self._abandoned) + Counter(self._asyncio.abandoned)
        return {name: count for name, count in counts.items() if count}

    async def run_asyncio(
        self,
        name: str,
        function: Callable[..., Awaitable[T]],
        *args: object,
        cleanup_s: float | None = None,
        is_apart: bool = False,
    ) -> T:
        """``await function(*args)`` on asyncio: here, or under trio on one asyncio thread.

        For code that needs asyncio. Cancellation cancels it there, and waits a moment for it:
        `cleanup_s`, where that is given. With `is_apart` it runs on that thread under asyncio too:
        code that blocks its loop then blocks no engine.

        Raises:
            ToolError: It raised SystemExit or the like, or cancelled itself, or `max_abandoned`
                calls of this name are still running.
        """
        self._refuse_beyond_cap(name)
        return await self._asyncio.run(
            name, function, *args, cleanup_s=cleanup_s, is_apart=is_apart
        )

    async def run(
        self,
        name: str,
        function: Callable[..., T],
        *args: object,
        begin: Callable[[], None] | None = None,
    ) -> T:
        """`function(*args)` in a daemon thread; cancellation abandons it at once.

        Args:
            begin: Called when the wait for a thread is over.

        Raises:
            ToolError: `max_abandoned` threads of this name are still running.
        """
        self._refuse_beyond_cap(name)
        # A token per call, not per task: one trajectory may have several calls under way.
        borrower = object()
        try:
            await self._limiter.acquire_on_behalf_of(borrower)
            self._refuse_beyond_cap(name)  # those before it may have been abandoned meanwhile
            if begin is not None:
                begin()
            return await self._run_in_worker(name, function, args)
        finally:
            give_back(self._limiter, borrower)

    async def run_beside(
        self, name: str, function: Callable[..., T], *args: object, patience_s: float
    ) -> T:
        """`function(*args)` in a daemon thread that takes none of the pool's places.

        For calls that are bounded in number elsewhere, and long. Cancellation abandons the thread
        where its function does not return within `patience_s`.

        Raises:
            ToolError: `max_abandoned` threads of this name are still running.
        """
        self._refuse_beyond_cap(name)
        return await self._run_in_worker(name, function, args, patience_s)

    def _refuse_beyond_cap(self, name: str) -> None:
        abandoned = self._abandoned.get(name, 0) + self._asyncio.abandoned.get(name, 0)
        if abandoned >= self._max_abandoned:
            raise ToolError(
                f"{name}: {abandoned} abandoned threads are still running "
                f"(tools.max_abandoned_threads = {self._max_abandoned}); not called"
            )

    async def _run_in_worker(
        self,
        name: str,
        function: Callable[..., T],
        args: tuple[object, ...],
        patience_s: float = 0.0,
    ) -> T:
        post, given = loop_poster(), carried.get()
        future: Future[T] = Future()
        done = anyio.Event()
        was_abandoned = False

        def finished() -> None:
            done.set()
            if was_abandoned:
                self._abandoned[name] -= 1

        worker = self._idle.pop() if self._idle else _Worker(self._idle)

        def job() -> None:
            try:
                carried.set(given)
                future.set_result(function(*args))
            except BaseException as error:  # a thread must report even SystemExit
                future.set_exception(error)
            carried.set(None)
            self._idle.append(worker)
            if self._is_closed:  # meanwhile, and nothing else will end this one
                self.close()
            post(finished)

        elsewhere, activity = worker.frames, f"a thread of {name}"  # noqa: F841  (see `wait_places`)
        worker.jobs.put(job)
        try:
            await done.wait()
        except BaseException:
            if patience_s:
                with anyio.move_on_after(patience_s, shield=True):
                    await done.wait()
            if not done.is_set():
                was_abandoned = True
                self._abandoned[name] = self._abandoned.get(name, 0) + 1
            raise
        return take_result(future, name)

    def close(self) -> None:
        """End idle threads; running ones end by themselves when their function returns."""
        if not self._is_closed:
            self._asyncio.close()
        self._is_closed = True
        with suppress(IndexError):  # a thread that has just finished may empty the list with us
            while True:
                self._idle.pop().jobs.put(None)
