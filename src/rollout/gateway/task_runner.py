"""Between tasks that serve HTTP, in their thread, and those in which a trajectory runs."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, TypeVar

import anyio

from rollout.bridge import loop_poster, wait_future
from rollout.gateway.calls import GatewayError, refuse_ended
from rollout.observe.blocking_code import find_blocking_code, is_running

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

T = TypeVar("T")
Wait = Callable[[Future[T]], Awaitable[T]]


class LoopBlockedError(GatewayError):
    """The code that asks blocks the loop that would have to answer."""


class TaskRunner:
    """Runs functions in a task group, for callers in other tasks, on whatever loop.

    Args:
        tasks: The group, of `open_task_group`; the runner is made on its loop.
    """

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._context = copy_context()
        self._post = loop_poster()
        self._thread = threading.get_ident()

    async def run(
        self,
        function: Callable[[anyio.TaskHandle[None]], Awaitable[T]],
        *,
        wait: Wait[T] = wait_future,
        begin_s: float = math.inf,
        activity: str = "",
    ) -> T:
        """What the function returns or raises; cancelling the caller cancels it, and waits for it.

        Args:
            function: Is given its task, which the caller cancels.
            wait: Waits for the future of the result; what it raises before cancels the function.
            begin_s: How long `activity`, as the watchdog names it, may keep the loop of the group
                from beginning it.

        Raises:
            GatewayError: The group is cancelled.
            LoopBlockedError: The loop was kept from it longer.
        """
        future: Future[T] = Future()
        task: anyio.TaskHandle[None] | None = None
        is_cancelled = False

        async def run() -> None:
            assert task is not None
            try:
                future.set_result(await function(task))
            except Exception as error:
                future.set_exception(error)
            finally:
                if not future.done():
                    future.set_exception(refuse_ended())

        def begin() -> None:
            nonlocal task
            if is_cancelled or self._tasks.cancel_scope.cancel_called:
                future.set_exception(refuse_ended())
            else:
                task = self._context.run(self._tasks.start_soon, run)

        def cancel() -> None:
            if task is not None:
                task.cancel()

        self.call_soon(begin)
        try:
            while True:
                with anyio.move_on_after(begin_s):
                    return await wait(future)
                if task is None:
                    self._check_blocked(begin_s, activity)
        except BaseException:
            is_cancelled = True
            self.call_soon(cancel)
            if task is not None and not future.done():
                with anyio.CancelScope(shield=True), suppress(Exception):
                    await wait_future(future)
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function on the loop of the group: at once where that is this one."""
        if threading.get_ident() == self._thread:
            function()
        else:
            self._post(function)

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
