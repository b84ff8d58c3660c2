"""The running event loop for other threads: its clock, callbacks posted to it, futures awaited.

A foreign thread posts a callback to the loop without ever waiting for it: waiting (as
`from_thread.run_sync` does) can deadlock where the thread belongs to other code, such as Ray.
"""

from __future__ import annotations

import asyncio  # noqa: TID251  (one of the two modules that may)
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import sniffio
from anyio.lowlevel import current_token

if TYPE_CHECKING:
    from concurrent.futures import Future

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


def settle(future: Future[T], function: Callable[..., T], *args: Any) -> None:
    """Give a future what ``function(*args)`` returns or raises, SystemExit included."""
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)
