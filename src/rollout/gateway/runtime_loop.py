"""Between the loop that serves HTTP, in its thread, and that of the runtime."""

from __future__ import annotations

import math
import sys
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import anyio

from rollout.bridge import loop_poster, wait_future
from rollout.gateway.calls import GatewayError
from rollout.observe.blocking_code import find_blocking_code, is_running
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from anyio.abc import TaskGroup

T = TypeVar("T")


class LoopBlockedError(GatewayError):
    """The code that asks blocks the loop that would have to answer."""


class RuntimeLoop:
    """Runs functions where the runtime runs, for handlers of requests; made by `open_runtime_loop`.

    Code on the runtime's own loop awaits them directly.
    """

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._post = loop_poster()
        self._thread = threading.get_ident()

    async def run(
        self,
        function: Callable[..., Awaitable[T]],
        *args: object,
        begin_s: float = math.inf,
        activity: str = "",
    ) -> T:
        """``await function(*args)``; cancelling the caller cancels it.

        Args:
            function: Is called there.
            args: Of the function.
            begin_s: How long `activity`, as the watchdog names it, may keep that loop from calling
                the function.

        Raises:
            LoopBlockedError: It was kept from that longer.
        """
        if threading.get_ident() == self._thread:
            return await function(*args)
        future: Future[T] = Future()
        scope: anyio.CancelScope | None = None
        has_begun = is_cancelled = False

        async def run() -> None:
            nonlocal scope
            try:
                with anyio.CancelScope() as scope:  # that of the loop there
                    if is_cancelled:
                        scope.cancel()
                    future.set_result(await function(*args))
            except Exception as error:
                future.set_exception(error)
            finally:
                if not future.done():
                    future.set_exception(_refuse_closed())

        def begin() -> None:
            nonlocal has_begun
            has_begun = True
            try:
                self._tasks.start_soon(run)
            except RuntimeError:  # the group has ended, and nothing may be raised here
                future.set_exception(_refuse_closed())

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True
            if scope is not None:
                scope.cancel()

        self._post(begin)
        try:
            while True:
                with anyio.move_on_after(begin_s):
                    return await wait_future(future)
                if not has_begun:
                    self._check_blocked(begin_s, activity)
        except BaseException:
            self._post(cancel)
            raise

    def post(self, function: Callable[..., object], *args: object) -> None:
        """`function(*args)`, soon."""
        self._post(lambda: function(*args))

    def _check_blocked(self, seconds: float, activity: str) -> None:
        frame = sys._current_frames().get(self._thread)
        if frame is None or not is_running(frame, activity):
            return
        code = find_blocking_code(frame)
        if code is not None:
            remedy = "" if code.remedy else "; use an async client, such as AsyncOpenAI"
            message = (
                f"the request waited for {seconds:g} s, since its own agent blocks the event loop "
                f"that answers it: {code.text}{remedy}"
            )
            raise LoopBlockedError(503, "loop_blocked", message)


def _refuse_closed() -> GatewayError:
    return GatewayError(403, "trajectory_ended", "the gateway is closed")


@asynccontextmanager
async def open_runtime_loop() -> AsyncIterator[RuntimeLoop]:
    """The current loop, for handlers on another one; what they started is cancelled at the end."""
    async with open_task_group() as tasks:
        yield RuntimeLoop(tasks)
