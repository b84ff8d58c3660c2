"""Between the loop that serves HTTP, in its thread, and that of the runtime."""

from __future__ import annotations

import math
import sys
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from rollout.bridge import loop_poster, wait_future
from rollout.gateway.calls import GatewayError
from rollout.observe.blocking_code import find_blocking_code, is_running
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from anyio.abc import TaskGroup

    from rollout.observe.blocking_code import BlockingCode

T = TypeVar("T")


class LoopBlockedError(GatewayError):
    """The code that asks blocks the loop that would have to answer."""

    def __init__(self, seconds: float, code: BlockingCode) -> None:
        remedy = "" if code.remedy else "; use an async client, such as AsyncOpenAI"
        super().__init__(
            503,
            "loop_blocked",
            f"the request waited for {seconds:g} s, since its own agent blocks the event loop that "
            f"answers it: {code.text}{remedy}",
        )


class RuntimeLoop:
    """Runs functions where the runtime runs, for handlers of requests; made by `open_runtime_loop`.

    For code on the runtime's own loop nothing is between them.
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
        if self._is_here:
            return await function(*args)
        visit = _Visit(function, args)
        self._post(lambda: visit.begin(self._tasks))
        try:
            while True:
                with anyio.move_on_after(begin_s):
                    return await wait_future(visit.future)
                if not visit.has_begun:
                    self._check_blocked(begin_s, activity)
        except BaseException:
            self._post(visit.cancel)
            raise

    def post(self, function: Callable[..., object], *args: object) -> None:
        """`function(*args)`, soon."""
        if self._is_here:
            function(*args)
        else:
            self._post(lambda: function(*args))

    def _check_blocked(self, seconds: float, activity: str) -> None:
        frame = sys._current_frames().get(self._thread)
        if frame is None or not is_running(frame, activity):
            return
        code = find_blocking_code(frame)
        if code is not None:
            raise LoopBlockedError(seconds, code)

    @property
    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread


class _Visit:
    """A call on the runtime's loop, seen from the other one.

    Attributes:
        has_begun: Whether that loop has come to it.
    """

    def __init__(self, function: Callable[..., Awaitable[Any]], args: tuple[object, ...]) -> None:
        self._function = function
        self._args = args
        self._scope: anyio.CancelScope | None = None
        self._is_cancelled = False
        self.has_begun = False
        self.future: Future[Any] = Future()

    def begin(self, tasks: TaskGroup) -> None:
        self.has_begun = True
        try:
            tasks.start_soon(self._run)
        except RuntimeError:  # the group has ended, and nothing may be raised here
            self._refuse()

    async def _run(self) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                if self._is_cancelled:
                    self._scope.cancel()
                try:
                    self.future.set_result(await self._function(*self._args))
                except Exception as error:
                    self.future.set_exception(error)
        finally:
            if not self.future.done():
                self._refuse()

    def _refuse(self) -> None:
        self.future.set_exception(GatewayError(403, "trajectory_ended", "the gateway is closed"))

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._scope is not None:
            self._scope.cancel()


@asynccontextmanager
async def open_runtime_loop() -> AsyncIterator[RuntimeLoop]:
    """The current loop, for handlers on another one; what they started is cancelled at the end."""
    async with open_task_group() as tasks:
        yield RuntimeLoop(tasks)
