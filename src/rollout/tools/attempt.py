"""Running foreign code: whatever it raises becomes one failure, and cancellation passes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
import anyio.lowlevel

from rollout.containment import (
    Contained,
    UnresponsiveError,
    containment_here,
    current_containment,
)
from rollout.errors import LimitExceeded, ToolError
from rollout.limits import call_limit
from rollout.scopes import find_exception
from rollout.types import read_message

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from rollout.limits import Limit

T = TypeVar("T")

#: Characters of an exception's message that the model sees.
MAX_MESSAGE = 500


class CallError(Exception):
    """A tool raised; the text says what, for the model. The exception itself is the cause."""

    @property
    def root(self) -> BaseException:
        """What was raised, out of any groups around it."""
        cause = self.__cause__ or self
        return find_exception(cause) or cause


def attempt(
    action: Callable[..., Awaitable[T]],
    *args: object,
    limit: Limit,
    what: str,
    activity: str | None = None,
) -> Coroutine[Any, Any, T]:
    """Await what ``action(*args)`` returns; it runs in a task of its own.

    Args:
        action: Runs within `limit`.
        what: What it is, for messages.
        activity: Whose work it is, where it blocks the event loop.

    Raises:
        CallError: It raised anything but KeyboardInterrupt, which is raised as itself.
        LimitExceeded: `limit` was over; the action was cancelled, and has ended.
        UnresponsiveError: It was cancelled, and did not end.
    """
    function = partial(action, *args)
    containment = current_containment()
    if containment is None:
        return _attempt_outside(function, limit, what)
    code: Contained[T] = Contained(containment, what, activity)
    return conclude(code, code.run(function), limit)


async def _attempt_outside(function: Callable[[], Awaitable[T]], limit: Limit, what: str) -> T:
    """`attempt` outside of a runtime."""
    async with containment_here():
        return await attempt(function, limit=limit, what=what)


async def conclude(code: Contained[T], running: Awaitable[object], limit: Limit) -> T:
    """Return what contained code returns, for whose report `running` waits; as `attempt`."""
    limit.govern(code.scope)
    token = call_limit.set(limit)
    try:
        await running
    finally:
        call_limit.reset(token)
        limit.release()
    error = code.error
    if error is None and not code.was_cancelled:
        return cast("T", code.value)
    interrupt = None if error is None else find_exception(error, KeyboardInterrupt)
    if interrupt is not None:
        raise interrupt
    if limit.is_over and (error is None or code.scope.cancel_called):
        raise limit.deadline.error()
    if error is None:
        raise CallError(f"{code.what} was cancelled: the runtime is closing")
    raise CallError(describe(error)) from error


def describe(error: BaseException) -> str:
    """One short text for the model: type and message; a `ToolError` speaks for itself."""
    leaf = find_exception(error) or error
    message = read_message(leaf)
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "…"
    if isinstance(leaf, ToolError) and message:
        return message
    name = type(leaf).__name__
    return f"{name}: {message}" if message else name


async def run_side_by_side(jobs: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Run the jobs at the same time and wait for all; each is begun before the next one.

    A KeyboardInterrupt, a `LimitExceeded`, a `ToolError`, or the `UnresponsiveError` of a job that
    was given up ends the others and is raised here as itself: out of a task it would be a group.
    """
    if len(jobs) == 1:
        await jobs[0]()
        return
    failures: list[BaseException] = []
    async with anyio.create_task_group() as group:

        async def run(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
            try:
                await job()
            except (KeyboardInterrupt, LimitExceeded, ToolError, UnresponsiveError) as failure:
                failures.append(failure)
                group.cancel_scope.cancel()

        for position, job in enumerate(jobs):
            if position:
                await anyio.lowlevel.checkpoint()  # trio shuffles what is ready at the same time
            group.start_soon(run, job)
    if failures:
        raise failures[0]
