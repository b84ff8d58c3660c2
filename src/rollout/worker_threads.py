"""Threads for code of users, which may not come back, and the asyncio loop in one of them.

All of them are daemons, abandoned where their code does not end, so that no such code holds the
event loop or the exit of the process. trio keeps those of single calls for further ones, also where
asyncio runs: starting a thread waits for it, and where others compute the loop would stand still.
"""

from __future__ import annotations

import asyncio  # noqa: TID251  (one of the two modules that may)
import inspect
import math
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import sniffio

from rollout.bridge import loop_poster, runs_on_trio, settle
from rollout.containment import enter_containment, note_where_it_waits
from rollout.errors import ToolError
from rollout.wait_places import find_frames, find_thread_frames

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from types import FrameType

T = TypeVar("T")

#: How long closing waits, on the caller's loop, for the thread of a loop whose calls have ended.
LAST_STEPS_S = 0.2


class ThreadEntry:
    """How this process's event loops enter threads; `rollout.testing` changes it meanwhile.

    Attributes:
        is_open: Whether work of the library's own, its timers of real time included, leaves the
            event loop.
        waiting: Is entered while a task waits for foreign code in a thread.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.waiting: Callable[[], AbstractContextManager[Any]] = nullcontext


thread_entry = ThreadEntry()


def may_leave_loop() -> bool:
    """Whether work of the library's own leaves the event loop."""
    return thread_entry.is_open


async def run_in_thread(
    function: Callable[..., T], *args: object, limiter: anyio.CapacityLimiter | None = None
) -> T:
    """``function(*args)``, work of the library's own that ends; cancellation waits for its end."""
    if not thread_entry.is_open:
        return function(*args)
    return await anyio.to_thread.run_sync(partial(function, *args), limiter=limiter)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives an awaitable; callable objects count by their `__call__`."""
    call = getattr(function, "__call__", function)  # noqa: B004  (the method itself is wanted)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


class WorkerThreads:
    """Daemon threads for sync tools and sync reward functions, and one with a loop of asyncio's.

    A call that is cancelled abandons its thread: the pool's token is released at once, the thread
    runs on until its function returns, and it delays neither `close` nor the exit of the process.
    Abandoned calls are counted by name; a call past `max_abandoned` of its name is a `ToolError`,
    and so is what code raised in another thread that would end more than its call here.

    Args:
        max_threads: Calls of `run` at the same time; further ones wait.
        max_abandoned: Calls of one name that may have been abandoned and still run.
        cleanup_s: How long a call of `run_asyncio` has to end once it was cancelled.
        watch: Runs on the loop of `run_asyncio`'s thread, for as long as that does.
    """

    def __init__(
        self,
        *,
        max_threads: int = 1,
        max_abandoned: float = math.inf,
        cleanup_s: float = 5.0,
        watch: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._limiter = anyio.CapacityLimiter(max_threads)
        self._max_abandoned, self._cleanup_s = max_abandoned, cleanup_s
        self._watch = watch if may_leave_loop() else None
        self._abandoned: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._leave_loop = asyncio.Event()

    @classmethod
    def on_current_loop(cls, *, cleanup_s: float) -> WorkerThreads:
        """Has the asyncio loop that runs here, for callers on trio; `close` leaves it as it is."""
        threads = cls(cleanup_s=cleanup_s)
        threads._loop = asyncio.get_running_loop()
        return threads

    @property
    def abandoned(self) -> dict[str, int]:
        """Calls left behind and still running, by name."""
        return dict(+self._abandoned)

    async def run(
        self,
        name: str,
        function: Callable[..., T],
        *args: object,
        begin: Callable[[], None] = lambda: None,
    ) -> T:
        """`function(*args)` in a daemon thread; cancellation abandons it at once.

        Args:
            begin: Called when the wait for a thread is over.
        """
        self._refuse_beyond_cap(name)
        async with self._limiter:
            begin()
            return await self.run_beside(name, function, *args)

    async def run_beside(
        self, name: str, function: Callable[..., T], *args: object, patience_s: float = 0.0
    ) -> T:
        """`function(*args)` in a daemon thread that takes no token of the pool.

        For calls that are bounded in number elsewhere, and long. Cancellation abandons the thread
        where its function does not return within `patience_s`.
        """
        from trio.lowlevel import start_thread_soon  # under asyncio anyio's threads are no daemons

        self._refuse_beyond_cap(name)
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()  # it begins, whatever becomes of the caller
        context, thread = copy_context(), None
        context.run(sniffio.current_async_library_cvar.set, None)  # no loop runs in the thread
        context.run(enter_containment, None)

        def work() -> T:
            nonlocal thread
            thread = threading.current_thread()
            return context.run(function, *args)

        start_thread_soon(work, lambda ended: settle(result, ended.unwrap), "rollout-worker")
        with thread_entry.waiting(), note_where_it_waits(lambda: find_thread_frames(thread)):
            return await self._wait_for(result, name, patience_s)

    async def call(
        self, name: str, function: Callable[..., Any], *args: object, backend: str = "native"
    ) -> Any:
        """What a function of a user's returns: a sync one runs in a thread, as by `run`.

        Args:
            backend: Where an async one runs, or what a sync wrapper of one returns: "native" on the
                loop here, "asyncio" as by `run_asyncio`.
        """
        if not is_async(function):
            value = await self.run(name, function, *args)
            if not inspect.isawaitable(value):
                return value
            function, args = lambda: value, ()
        if backend == "asyncio":
            return await self.run_asyncio(name, function, *args)
        return await function(*args)

    async def run_asyncio(
        self,
        name: str,
        function: Callable[..., Awaitable[T]],
        *args: object,
        is_apart: bool = False,
    ) -> T:
        """``await function(*args)`` on asyncio: here, or under trio on one asyncio thread.

        The call has a task of its own, because code for asyncio expects to be cancelled once, and
        not at each of its further awaits as in a scope of anyio. Cancellation of the caller cancels
        that task, which has `cleanup_s` to end; one that does not is abandoned, and counted. A call
        that is cancelled before it begins is not made, and not waited for.

        Args:
            is_apart: Run on that thread also under asyncio: code that blocks its loop then blocks
                no engine.
        """
        self._refuse_beyond_cap(name)
        is_here = not (is_apart or runs_on_trio())
        loop = asyncio.get_running_loop() if is_here else self._loop or self._start_loop()
        result: Future[T] = Future()

        async def call() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(await function(*args))
                except BaseException as error:  # the loop must outlive SystemExit
                    result.set_exception(error)

        def find_frames_there() -> list[FrameType]:
            if coroutine.cr_running:  # blocks the loop
                return find_thread_frames(self._loop_thread)
            return find_frames(coroutine)

        context = copy_context()
        coroutine: Any = call()
        # Where anyio runs trio it says so there, and the call would take its loop for trio's.
        context.run(sniffio.current_async_library_cvar.set, "asyncio")
        task = context.run(asyncio.run_coroutine_threadsafe, coroutine, loop)
        with note_where_it_waits(find_frames_there):
            return await self._wait_for(result, name, self._cleanup_s, task.cancel)

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        """Start the asyncio thread, whose loop takes calls at once.

        `anyio.from_thread.start_blocking_portal` would join its thread, and code that swallows its
        cancellation would hold the runtime's loop meanwhile.
        """
        loop = self._loop = asyncio.new_event_loop()

        async def wait_for_close() -> None:
            async with anyio.create_task_group() as tasks:
                if self._watch is not None:
                    tasks.start_soon(self._watch)
                await self._leave_loop.wait()
                tasks.cancel_scope.cancel()

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(wait_for_close())

        self._loop_thread = threading.Thread(target=run, name="rollout-asyncio", daemon=True)
        self._loop_thread.start()
        return loop

    async def _wait_for(
        self,
        call: Future[T],
        name: str,
        patience_s: float,
        stop: Callable[[], object] = lambda: None,
    ) -> T:
        """What a call in another thread returned or raised.

        A caller that is cancelled cancels a call that has not begun; else it calls `stop`, and
        waits `patience_s` before it abandons the call.
        """
        ended, post = anyio.Event(), loop_poster()
        call.add_done_callback(lambda _: post(ended.set))
        try:
            await ended.wait()
        except BaseException:
            if not call.cancel():
                stop()
                try:
                    with anyio.move_on_after(patience_s, shield=patience_s > 0):
                        await ended.wait()
                finally:  # the wait itself may be stopped
                    if not ended.is_set():
                        self._abandoned[name] += 1
                        forget = partial(self._abandoned.subtract, [name])
                        call.add_done_callback(lambda _: post(forget))
            raise
        try:
            return call.result()
        except (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError) as error:
            # On the loop here they would mean Ctrl-C, an end, or a cancellation.
            raise ToolError(f"{name}: raised {type(error).__name__} in its thread") from error

    def _refuse_beyond_cap(self, name: str) -> None:
        abandoned = self._abandoned[name]
        if abandoned >= self._max_abandoned:
            raise ToolError(
                f"{name}: {abandoned} abandoned threads are still running "
                f"(tools.max_abandoned_threads = {self._max_abandoned}); not called"
            )

    def close(self) -> None:
        """End the loop; running code ends by itself, left behind."""
        thread, self._loop_thread = self._loop_thread, None
        if self._loop is not None and thread is not None:
            self._loop.call_soon_threadsafe(self._leave_loop.set)
            if not self.abandoned:  # else it may take for ever, and our loop waits here
                thread.join(timeout=LAST_STEPS_S)
