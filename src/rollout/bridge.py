"""The one module that carries results from foreign threads to the event loop.

A foreign thread posts a callback to the loop without ever waiting for it: waiting (as
`from_thread.run_sync` does) can deadlock where the thread belongs to somebody else, such as Ray.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import current_token

from rollout.errors import ToolError

T = TypeVar("T")
Post = Callable[[Callable[[], object]], None]

#: An idle worker thread ends after this long; an active batch reuses threads far sooner.
IDLE_S = 10.0


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
        ):  # the loop is gone, and with it whoever waited (trio: RunFinishedError)
            return

    return post


def has_virtual_clock() -> bool:
    """Whether the loop runs on a clock that is not the machine's, such as trio's MockClock."""
    if not hasattr(current_token().native_token, "run_sync_soon"):
        return False
    import trio

    return type(trio.lowlevel.current_clock()).__name__ != "SystemClock"


def runs_on_trio() -> bool:
    """Whether the current event loop is trio's."""
    trio = sys.modules.get("trio")
    return trio is not None and trio.lowlevel.in_trio_run()


def native_cancellations() -> int:
    """How often `asyncio.Task.cancel` was called on this task and not taken back; 0 on trio.

    A cancelled scope of anyio calls it too, and takes it back when it is left.
    """
    if runs_on_trio():
        return 0
    import asyncio  # noqa: TID251  (this is that module)

    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def wait_future(future: Future[T]) -> T:
    """The result of a concurrent future, awaited from trio or asyncio.

    Cancellation leaves the future alone: whoever made it decides what becomes of its work.
    """
    done = anyio.Event()
    post = loop_poster()
    future.add_done_callback(lambda _: post(done.set))
    await done.wait()
    return future.result()


class _Worker:
    """A daemon thread that serves one job after another."""

    def __init__(self, idle: list[_Worker]) -> None:
        self._idle = idle
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="rollout-worker", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=IDLE_S)
            except queue.Empty:
                try:
                    self._idle.remove(self)  # nobody can hand us a job from here on
                except ValueError:
                    continue  # taken out a moment ago: its job is on the way
                return
            if job is None:
                return
            job()


class WorkerThreads:
    """Daemon threads for sync tools and sync reward functions.

    A call that is cancelled abandons its thread: the place in the pool is given back at once, the
    thread runs on until its function returns, and it delays neither `close` nor the exit of the
    process. Abandoned threads are counted by name; past `max_abandoned` a name fails fast.
    """

    def __init__(self, *, max_threads: int, max_abandoned: int) -> None:
        self._limiter = anyio.CapacityLimiter(max_threads)
        self._max_abandoned = max_abandoned
        self._idle: list[_Worker] = []
        self._abandoned: dict[str, int] = {}
        self._is_closed = False

    @property
    def abandoned(self) -> dict[str, int]:
        """Threads left behind and still running, by name."""
        return {name: count for name, count in self._abandoned.items() if count}

    async def run(self, name: str, function: Callable[..., T], *args: object) -> T:
        """`function(*args)` in a daemon thread; cancellation abandons it at once.

        Raises:
            ToolError: `max_abandoned` threads of this name are still running.
        """
        if self._abandoned.get(name, 0) >= self._max_abandoned:
            raise ToolError(
                f"{name}: {self._abandoned[name]} abandoned threads are still running "
                f"(tools.max_abandoned_threads = {self._max_abandoned}); not called"
            )
        # A token per call, not per task: one trajectory may have several calls under way.
        borrower = object()
        await self._limiter.acquire_on_behalf_of(borrower)
        try:
            return await self._run_in_worker(name, function, args)
        finally:
            self._limiter.release_on_behalf_of(borrower)

    async def _run_in_worker(
        self, name: str, function: Callable[..., T], args: tuple[object, ...]
    ) -> T:
        post = loop_poster()
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
                future.set_result(function(*args))
            except BaseException as error:  # a thread must report even SystemExit
                future.set_exception(error)
            self._idle.append(worker)
            if self._is_closed:  # meanwhile, and nobody else will end this one
                self.close()
            post(finished)

        worker.jobs.put(job)
        try:
            await done.wait()
        except BaseException:
            if not done.is_set():
                was_abandoned = True
                self._abandoned[name] = self._abandoned.get(name, 0) + 1
            raise
        try:
            return future.result()
        except (KeyboardInterrupt, SystemExit, GeneratorExit, FutureCancelledError) as error:
            raise ToolError(f"{name}: raised {type(error).__name__} in its thread") from error

    def close(self) -> None:
        """End idle threads; running ones end by themselves when their function returns."""
        self._is_closed = True
        with suppress(IndexError):  # a thread that has just finished may empty the list with us
            while True:
                self._idle.pop().jobs.put(None)
