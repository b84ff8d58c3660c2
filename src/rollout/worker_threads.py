"""Threads for code of users, which may not come back, and the asyncio loop in one of them.

All of them are daemons, abandoned where their code does not end, so that no such code holds the
event loop or the exit of the process.
"""

from __future__ import annotations

import asyncio  # noqa: TID251  (one of the two modules that may)
import inspect
import queue
import sys
import threading
from collections import Counter
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import sniffio

from rollout.bridge import loop_poster, runs_on_trio, settle
from rollout.containment import await_frames, leave_containment, note_where_it_waits
from rollout.errors import ToolError
from rollout.scopes import release_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from types import FrameType

T = TypeVar("T")

#: An idle worker thread ends after this long; an active batch reuses threads far sooner.
IDLE_S = 10.0
#: How long code on the asyncio thread has to end once it was cancelled; as limits.cleanup_s.
ASYNCIO_CLEANUP_S = 5.0
#: How long closing waits, on the caller's loop, for the thread of a loop whose calls have ended.
LAST_STEPS_S = 0.2


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


def _find_frames(thread: threading.Thread | None) -> list[FrameType]:
    """Where a thread is, from the outermost frame in."""
    at = None if thread is None else sys._current_frames().get(thread.ident or 0)
    frames = []
    while at is not None:
        frames.append(at)
        at = at.f_back
    return frames[::-1]


class ForeignCall(Future[T]):
    """A call of foreign code in another thread, whose caller may stop waiting for it.

    Args:
        name: Names the code in messages and counts.
        abandoned: Counts, by name, the calls that still run and have no caller any more.
    """

    def __init__(self, name: str, abandoned: dict[str, int]) -> None:
        super().__init__()
        self._name, self._abandoned, self._was_abandoned = name, abandoned, False
        post, self._ended = loop_poster(), anyio.Event()
        self.add_done_callback(lambda _: post(self._finish))

    def _finish(self) -> None:
        self._ended.set()
        if self._was_abandoned:
            self._abandoned[self._name] -= 1

    async def wait(self, patience_s: float, stop: Callable[[], bool] = lambda: True) -> T:
        """What the call returned or raised.

        Args:
            patience_s: How long a caller that is cancelled waits before it abandons the call.
            stop: Cancels the call; False where nobody needs to wait for it then.

        Raises:
            ToolError: The call raised what would end a loop or cancel its caller.
        """
        try:
            await self._ended.wait()
        except BaseException:
            if stop():
                try:
                    with anyio.move_on_after(patience_s, shield=patience_s > 0):
                        await self._ended.wait()
                finally:  # the wait itself may be stopped
                    if not self._ended.is_set():
                        self._was_abandoned = True
                        self._abandoned[self._name] = self._abandoned.get(self._name, 0) + 1
            raise
        try:
            return self.result()
        except (KeyboardInterrupt, SystemExit, GeneratorExit, FutureCancelledError) as error:
            raised = type(error).__name__
            raise ToolError(f"{self._name}: raised {raised} in its thread") from error
        except asyncio.CancelledError as error:
            raise ToolError(f"{self._name}: cancelled itself") from error


class _DaemonExecutor(ThreadPoolExecutor):
    """What `asyncio.to_thread` uses in our thread: one that hangs must not delay the exit."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        work = partial(settle, future, fn, *args, **kwargs)
        threading.Thread(target=work, name="rollout-asyncio-worker", daemon=True).start()
        return future


class AsyncioThread:
    """An asyncio event loop in a daemon thread, which starts with the first call.

    `anyio.from_thread.start_blocking_portal` would join its thread, and code that swallows its
    cancellation would hold the runtime's loop meanwhile.

    Args:
        cleanup_s: How long a cancelled call has to end.
        watch: Runs on that loop too, for as long as it does.

    Attributes:
        abandoned: Calls that did not end in time and still run, by name.
    """

    def __init__(
        self, *, cleanup_s: float, watch: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        self._cleanup_s, self._watch = cleanup_s, watch
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._leave = asyncio.Event()
        self.abandoned: dict[str, int] = {}

    @classmethod
    def of_current_loop(cls, *, cleanup_s: float) -> AsyncioThread:
        """The asyncio loop that runs here, for callers on trio; `close` leaves it as it is."""
        thread = cls(cleanup_s=cleanup_s)
        thread._loop = asyncio.get_running_loop()
        return thread

    async def run(
        self,
        name: str,
        function: Callable[..., Awaitable[T]],
        *args: object,
        cleanup_s: float | None = None,
        is_apart: bool = False,
    ) -> T:
        """``await function(*args)`` on that loop, or on the current one where that is asyncio's.

        The call has a task of its own, because code for asyncio expects to be cancelled once, and
        not at each of its further awaits as in a scope of anyio. Cancellation of the caller cancels
        that task, which has `cleanup_s` to end; one that does not is abandoned, and counted.

        Args:
            name: Names the code in messages and counts.
            function: Is called in the task.
            args: Are passed to it.
            cleanup_s: In place of the thread's own.
            is_apart: Run on that loop also where the current one is asyncio's. A call that is
                cancelled before it begins is not made, and not waited for.

        Raises:
            ToolError: The call raised SystemExit or the like, or cancelled itself.
        """
        is_here = not (is_apart or runs_on_trio())
        loop = asyncio.get_running_loop() if is_here else self._loop or self._start()
        running = ForeignCall[T](name, self.abandoned)
        task: asyncio.Task[Any] | None = None
        is_cancelled = False

        async def call() -> None:
            nonlocal task
            task = asyncio.current_task()
            if is_cancelled:  # set before the caller looks at `task`
                running.cancel()
                return
            try:
                running.set_result(await function(*args))
            except BaseException as error:  # the loop must outlive SystemExit
                running.set_exception(error)

        def stop() -> bool:
            nonlocal is_cancelled
            is_cancelled = True
            if is_apart and task is None:
                return False
            loop.call_soon_threadsafe(lambda: task and task.cancel())
            return True

        def find_frames() -> list[FrameType]:
            coroutine = None if task is None else task.get_coro()
            if getattr(coroutine, "cr_running", False):  # blocks the loop
                return _find_frames(self._thread)
            return await_frames(coroutine)

        context = copy_context()
        # Where anyio runs trio it says so there, and the call would take its loop for trio's.
        context.run(sniffio.current_async_library_cvar.set, "asyncio")
        context.run(asyncio.run_coroutine_threadsafe, call(), loop)
        with note_where_it_waits(find_frames):
            return await running.wait(self._cleanup_s if cleanup_s is None else cleanup_s, stop)

    def close(self) -> None:
        """End the loop and its thread; code that does not end is left behind on them."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._leave.set)
        if not any(self.abandoned.values()):  # else it may take for ever, and our loop waits here
            self._thread.join(timeout=LAST_STEPS_S)

    def _start(self) -> asyncio.AbstractEventLoop:
        """Start the thread; its loop takes calls at once."""
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = loop = runner.get_loop()
        loop.set_default_executor(_DaemonExecutor(max_workers=1))

        async def wait_for_close() -> None:
            await self._leave.wait()

        def run() -> None:
            with runner:
                runner.run(wait_for_close(), context=Context())

        if self._watch is not None:
            Context().run(asyncio.run_coroutine_threadsafe, self._watch(), loop)
        self._thread = threading.Thread(target=run, name="rollout-asyncio", daemon=True)
        self._thread.start()
        return loop


class _Worker:
    """A daemon thread that serves one job after another.

    Kept for further jobs, because starting a thread waits for it: where other threads compute, the
    event loop would stand still for some milliseconds.
    """

    def __init__(self, idle: list[_Worker]) -> None:
        self._idle = idle
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="rollout-worker", daemon=True)
        self.thread.start()

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
        watch = watch if may_leave_loop() else None
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
            if begin is not None:
                begin()
            return await self.run_beside(name, function, *args, patience_s=0.0)
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
        running, context = ForeignCall[T](name, self._abandoned), copy_context()
        context.run(sniffio.current_async_library_cvar.set, None)  # no loop runs in the thread
        context.run(leave_containment)
        worker = self._idle.pop() if self._idle else _Worker(self._idle)

        def job() -> None:
            context.run(settle, running, function, *args)
            self._idle.append(worker)
            if self._is_closed:  # meanwhile, and nothing else will end this one
                self.close()

        worker.jobs.put(job)
        with _entry.waiting(), note_where_it_waits(lambda: _find_frames(worker.thread)):
            return await running.wait(patience_s)

    def _refuse_beyond_cap(self, name: str) -> None:
        abandoned = self._abandoned.get(name, 0) + self._asyncio.abandoned.get(name, 0)
        if abandoned >= self._max_abandoned:
            raise ToolError(
                f"{name}: {abandoned} abandoned threads are still running "
                f"(tools.max_abandoned_threads = {self._max_abandoned}); not called"
            )

    def close(self) -> None:
        """End idle threads; running ones end by themselves when their function returns."""
        if not self._is_closed:
            self._asyncio.close()
        self._is_closed = True
        with suppress(IndexError):  # a thread that has just finished may empty the list with us
            while True:
                self._idle.pop().jobs.put(None)
