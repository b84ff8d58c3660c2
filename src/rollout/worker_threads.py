"""Daemon threads for sync code of users, which may not come back; the one place of threads."""

from __future__ import annotations

import inspect
import queue
import sys
import threading
from collections import Counter
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread

from rollout.bridge import AsyncioThread, ForeignCall, settle
from rollout.errors import ToolError
from rollout.scopes import release_token
from rollout.wait_places import thread_frames

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from types import FrameType

T = TypeVar("T")

#: An idle worker thread ends after this long; an active batch reuses threads far sooner.
IDLE_S = 10.0
#: How long code on the asyncio thread has to end once it was cancelled; as limits.cleanup_s.
ASYNCIO_CLEANUP_S = 5.0
#: What of the calling task the function sees in its thread.
carried: ContextVar[Any] = ContextVar("rollout_carried", default=None)


class ThreadEntry:
    """How event loops enter threads; `rollout.testing` puts another one in its place.

    Attributes:
        is_open: Whether work of the library's own, its timers of real time included, leaves the
            event loop.
    """

    is_open = True

    def waiting(self) -> AbstractContextManager[None]:
        """Entered while a task waits for foreign code in a thread."""
        return nullcontext()


_entry = ThreadEntry()


def enter_threads_by(entry: ThreadEntry) -> ThreadEntry:
    """Replace how this process enters threads; returns what did until now."""
    global _entry
    before, _entry = _entry, entry
    return before


def may_leave_loop() -> bool:
    """Whether work of the library's own leaves the event loop."""
    return _entry.is_open


async def run_in_thread(
    function: Callable[..., T], *args: object, limiter: anyio.CapacityLimiter | None = None
) -> T:
    """``function(*args)``, work of the library's own that ends; cancellation waits for its end."""
    if not _entry.is_open:
        return function(*args)
    return await anyio.to_thread.run_sync(partial(function, *args), limiter=limiter)


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

    A call that is cancelled abandons its thread: the pool's token is released at once, the thread
    runs on until its function returns, and it delays neither `close` nor the exit of the process.
    Abandoned threads are counted by name; past `max_abandoned` a name fails fast.

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
        self._asyncio = AsyncioThread(
            cleanup_s=ASYNCIO_CLEANUP_S, watch=watch if may_leave_loop() else None
        )
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

        See `AsyncioThread.run`. With `is_apart` it runs on that thread under asyncio too: code
        that blocks its loop then blocks no engine.

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
            release_token(self._limiter, borrower)

    async def run_beside(
        self, name: str, function: Callable[..., T], *args: object, patience_s: float
    ) -> T:
        """`function(*args)` in a daemon thread that takes no token of the pool.

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
        running, seen = ForeignCall[T](name, self._abandoned), carried.get()
        worker = self._idle.pop() if self._idle else _Worker(self._idle)

        def job() -> None:
            carried.set(seen)
            settle(running, function, *args)
            carried.set(None)
            self._idle.append(worker)
            if self._is_closed:  # meanwhile, and nothing else will end this one
                self.close()

        elsewhere, activity = worker.frames, f"a thread of {name}"  # noqa: F841  (see `wait_places`)
        worker.jobs.put(job)
        with _entry.waiting():
            return await running.wait(patience_s)

    def close(self) -> None:
        """End idle threads; running ones end by themselves when their function returns."""
        if not self._is_closed:
            self._asyncio.close()
        self._is_closed = True
        with suppress(IndexError):  # a thread that has just finished may empty the list with us
            while True:
                self._idle.pop().jobs.put(None)
