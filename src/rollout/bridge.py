"""The one module that carries results from foreign threads to the event loop.

A foreign thread posts a callback to the loop without ever waiting for it: waiting (as
`from_thread.run_sync` does) can deadlock where the thread belongs to other code, such as Ray.
"""

from __future__ import annotations

import asyncio  # noqa: TID251  (this is the module that may)
import math
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

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
        try:
            schedule(callback)
        except (
            RuntimeError
        ):  # the loop is gone, and with it the waiting tasks (trio: RunFinishedError)
            return

    return post


def has_virtual_clock() -> bool:
    """Whether the loop runs on a clock that is not the machine's, such as trio's MockClock."""
    if not hasattr(current_token().native_token, "run_sync_soon"):
        return False
    import trio

    return type(trio.lowlevel.current_clock()).__name__ != "SystemClock"


def runs_on_trio() -> bool:
    """Whether the current event loop is trio's.

    The loop itself is asked: while another thread imports trio, its module can be found and is
    not whole yet.
    """
    if sniffio.thread_local.name == "trio":  # which it would look at first
        return True
    try:
        return sniffio.current_async_library() == "trio"
    except sniffio.AsyncLibraryNotFoundError:  # a callback of asyncio, in no task
        return False


def loop_clock() -> Callable[[], float]:
    """`anyio.current_time` of this event loop; of no use in another one.

    For frequent callers, since anyio looks its backend up at every call, and for callers in other
    threads or in signal handlers, which run on no loop.
    """
    if not runs_on_trio():
        return asyncio.get_running_loop().time
    import trio

    return _clock_method(trio.lowlevel.current_clock())


@lru_cache(4)
def _clock_method(clock: Any) -> Callable[[], float]:
    """Its method, which thousands share."""
    method: Callable[[], float] = clock.current_time
    return method


def event_type() -> type[anyio.Event]:
    """The class of this event loop's events, for code that makes many: as `loop_clock`."""
    if not runs_on_trio():
        return type(anyio.Event())
    import trio

    return cast("type[anyio.Event]", trio.Event)


def cancel_scope(deadline: float = math.inf, *, shield: bool = False) -> anyio.CancelScope:
    """A cancel scope of this event loop, for code that opens one at every wait.

    As `anyio.CancelScope`, whose own layer costs half as much as trio's scope again.
    """
    if not runs_on_trio():
        return anyio.CancelScope(deadline=deadline, shield=shield)
    import trio

    scope: Any = trio.CancelScope(deadline=deadline, shield=shield)
    return scope  # type: ignore[no-any-return]


def native_cancellations() -> int:
    """How often `asyncio.Task.cancel` was called on this task and not taken back; 0 on trio.

    A cancelled scope of anyio calls it too, and takes it back when it is left.
    """
    if runs_on_trio():
        return 0
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def wait_future(future: Future[T]) -> T:
    """The result of a concurrent future, awaited from trio or asyncio.

    Cancellation leaves the future alone: its creator decides what becomes of its work.
    """
    done = anyio.Event()
    post = loop_poster()
    future.add_done_callback(lambda _: post(done.set))
    await done.wait()
    return future.result()


class _DaemonExecutor(ThreadPoolExecutor):
    """What `asyncio.to_thread` uses in our thread: one that hangs must not delay the exit."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="rollout-asyncio-worker", daemon=True).start()
        return future


#: How long closing waits, on the caller's loop, for the thread of a loop whose calls have ended.
LAST_STEPS_S = 0.2


class AsyncioThread:
    """An asyncio event loop in a daemon thread, for code that runs on no other.

    It starts with the first call. Cancellation and deadlines of the caller cancel the call's task.

    Args:
        watch: Runs on that loop too, for as long as it does.
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

        It has a task of its own, because code for asyncio expects to be cancelled once, and not at
        each of its further awaits as in a scope of anyio. On cancellation the call's task is
        cancelled and has `cleanup_s` to end; one that does not is abandoned, and counted by name.

        Args:
            name: Of the code, for messages and counts.
            function: Is called in the task.
            args: Of the function.
            cleanup_s: In place of the thread's own; infinite where the caller's supervision ends
                the wait.
            is_apart: On that loop also where the current one is asyncio's. A call that is cancelled
                before it began is not made, and not waited for.

        Raises:
            ToolError: The call raised SystemExit or the like, or cancelled itself.
        """
        if is_apart or runs_on_trio():
            loop = self._loop or self._start()
        else:
            loop = asyncio.get_running_loop()
        post, done = loop_poster(), anyio.Event()
        future: Future[T] = Future()
        task: asyncio.Task[Any] | None = None
        beginning = threading.Lock()  # taken by who decides whether the function is called
        was_abandoned = is_cancelled = False
        context = copy_context()
        # Where anyio runs trio it says so there, and the call would take its loop for trio's.
        context.run(sniffio.current_async_library_cvar.set, "asyncio")

        def finish() -> None:
            done.set()
            if was_abandoned:
                self.abandoned[name] -= 1

        async def call() -> None:
            nonlocal task
            task = asyncio.current_task()
            try:
                # It may have been cancelled while others blocked the loop.
                if not is_cancelled and beginning.acquire(blocking=False):
                    future.set_result(await function(*args))
            except BaseException as error:  # the loop must outlive SystemExit
                future.set_exception(error)
            finally:
                post(finish)

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True
            if task is not None:
                task.cancel()

        def elsewhere() -> list[FrameType]:  # see `wait_places`
            if task is None:  # it has not begun
                return []
            coroutine = task.get_coro()
            if getattr(coroutine, "cr_running", False) and self._thread is not None:
                # It blocks the loop, and waits for no coroutine: its thread knows its line.
                return thread_frames(sys._current_frames().get(self._thread.ident or 0))
            return await_frames(coroutine)

        activity = f"the asyncio task of {name}"  # noqa: F841  (see `wait_places`)
        context.run(asyncio.run_coroutine_threadsafe, call(), loop)
        try:
            await done.wait()
        except BaseException:
            if is_apart and beginning.acquire(blocking=False):  # there is nothing to wait for
                raise
            loop.call_soon_threadsafe(cancel)
            limit_s = self._cleanup_s if cleanup_s is None else cleanup_s
            try:
                with anyio.CancelScope(deadline=anyio.current_time() + limit_s, shield=True):
                    await done.wait()
            finally:  # a supervised wait may be given up
                if not done.is_set():
                    was_abandoned = True
                    self.abandoned[name] = self.abandoned.get(name, 0) + 1
            raise
        return take_result(future, name)

    def close(self) -> None:
        """End the loop and its thread, which code that does not end is left behind on."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._leave.set)
        if not any(self.abandoned.values()):  # else it may take for ever, and our loop waits here
            self._thread.join(timeout=LAST_STEPS_S)

    def _start(self) -> asyncio.AbstractEventLoop:
        """Start the thread; its loop takes calls at once, and nobody waits for it."""
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()
        self._loop.set_default_executor(_DaemonExecutor(max_workers=1))

        async def serve() -> None:
            async with anyio.create_task_group() as tasks:
                if self._watch is not None:
                    tasks.start_soon(self._watch)
                await self._leave.wait()
                tasks.cancel_scope.cancel()

        def run() -> None:
            with runner:
                runner.run(serve(), context=Context())

        self._thread = threading.Thread(target=run, name="rollout-asyncio", daemon=True)
        self._thread.start()
        return self._loop


def take_result(future: Future[T], name: str) -> T:
    """What a call of foreign code in another thread returned or raised.

    Raises:
        ToolError: It raised what would end a loop or cancel its caller.
    """
    try:
        return future.result()
    except (KeyboardInterrupt, SystemExit, GeneratorExit, FutureCancelledError) as error:
        raise ToolError(f"{name}: raised {type(error).__name__} in its thread") from error
    except asyncio.CancelledError as error:
        raise ToolError(f"{name}: cancelled itself") from error
