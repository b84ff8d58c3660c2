"""Carries calls and results between an event loop and threads of other code.

A foreign thread posts a callback to the loop without ever waiting for it: waiting (as
`from_thread.run_sync` does) can deadlock where the thread belongs to other code, such as Ray.
"""

from __future__ import annotations

import asyncio  # noqa: TID251  (this is the module that may)
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import sniffio
from anyio.lowlevel import current_token

from rollout.errors import ToolError
from rollout.wait_places import await_frames, thread_frames

if TYPE_CHECKING:
    from types import FrameType

T = TypeVar("T")
Post = Callable[[Callable[[], object]], None]


def loop_poster() -> Post:
    """A function that any thread may call to run a callback soon on the current event loop.

    Callbacks posted after the loop has ended are dropped.
    """
    native: Any = current_token().native_token
    schedule = getattr(native, "run_sync_soon", None) or native.call_soon_threadsafe

    def post(callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and its waiting tasks with it
            schedule(callback)

    return post


def runs_on_trio() -> bool:
    """Whether the current event loop is trio's."""
    try:
        return sniffio.current_async_library() == "trio"
    except sniffio.AsyncLibraryNotFoundError:  # a callback of asyncio, in no task
        return False


def loop_clock() -> Callable[[], float]:
    """`anyio.current_time` of this event loop, also for other threads and signal handlers."""
    if not runs_on_trio():
        return asyncio.get_running_loop().time
    import trio

    return trio.lowlevel.current_clock().current_time


async def wait_future(future: Future[T]) -> T:
    """The result of a concurrent future, awaited from trio or asyncio.

    Cancellation leaves the future alone: its creator decides what becomes of its work.
    """
    done = anyio.Event()
    post = loop_poster()
    future.add_done_callback(lambda _: post(done.set))
    await done.wait()
    return future.result()


def settle(future: Future[T], function: Callable[..., T], *args: Any, **named: Any) -> None:
    """Give a future what ``function(*args)`` returns or raises, SystemExit included."""
    try:
        future.set_result(function(*args, **named))
    except BaseException as error:
        future.set_exception(error)


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


#: How long closing waits, on the caller's loop, for the thread of a loop whose calls have ended.
LAST_STEPS_S = 0.2


class AsyncioThread:
    """An asyncio event loop in a daemon thread, which starts with the first call.

    Args:
        cleanup_s: How long a cancelled call has to end.
        watch: Runs on that loop too, for as long as it does.

    Attributes:
        abandoned: Calls that did not end in time and still run, by name.
    """

    def __init__(
        self, *, cleanup_s: float, watch: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        self._cleanup_s = cleanup_s
        self._watch = watch
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
        if is_apart or runs_on_trio():
            loop = self._loop or self._start()
        else:
            loop = asyncio.get_running_loop()
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

        def elsewhere() -> list[FrameType]:  # see `wait_places`
            coroutine = None if task is None else task.get_coro()
            if getattr(coroutine, "cr_running", False) and self._thread is not None:
                # It blocks the loop, and waits for no coroutine: its thread knows its line.
                return thread_frames(sys._current_frames().get(self._thread.ident or 0))
            return await_frames(coroutine)

        activity = f"the asyncio task of {name}"  # noqa: F841  (see `wait_places`)
        context = copy_context()
        # Where anyio runs trio it says so there, and the call would take its loop for trio's.
        context.run(sniffio.current_async_library_cvar.set, "asyncio")
        context.run(asyncio.run_coroutine_threadsafe, call(), loop)
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

        async def leave() -> None:
            await self._leave.wait()

        def run() -> None:
            with runner:
                runner.run(leave(), context=Context())

        if self._watch is not None:
            Context().run(asyncio.run_coroutine_threadsafe, self._watch(), loop)
        self._thread = threading.Thread(target=run, name="rollout-asyncio", daemon=True)
        self._thread.start()
        return loop
