"""Running foreign code: whatever it raises becomes one failure, and cancellation passes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
import anyio.lowlevel

from rollout.containment import Contained, UnresponsiveError, containment_here
from rollout.errors import ToolError
from rollout.limits import call_limit
from rollout.scopes import find_exception, find_propagating
from rollout.types import read_message

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

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

    def after(self, tries: int) -> CallError:
        """The same, said of the last of so many attempts."""
        return CallError(f"{self} (after {tries} attempts)")


async def attempt(
    action: Callable[..., Awaitable[T]],
    *args: object,
    limit: Limit,
    what: str,
    grace_s: float = 0.0,
) -> T:
    """What ``action(*args)`` returns; it runs in a task of its own.

    Args:
        action: Runs within `limit`.
        what: What it is, for messages.
        grace_s: How long it may still take once the caller is cancelled: what it has begun to
            acquire it can finish acquiring.

    Raises:
        CallError: It raised anything but KeyboardInterrupt, which is raised as itself.
        LimitExceeded: `limit` was over; the action was cancelled, and has ended.
        UnresponsiveError: It was cancelled, and did not end.
    """
    async with containment_here() as containment:
        code = Contained[T](containment, what)
        running = code.run(partial(action, *args), grace_s=grace_s)
        return cast("T", await conclude(code, running, limit))


async def conclude(code: Contained[T], running: Awaitable[object], limit: Limit) -> T | None:
    """What contained code returns which `running` waits for; as `attempt`."""
    limit.govern(code)
    token = call_limit.set(limit)
    try:
        await running
    finally:
        call_limit.reset(token)
        limit.release()
    error = code.error
    if error is None and not code.was_cancelled:
        return code.value
    interrupt = None if error is None else find_exception(error, KeyboardInterrupt)
    if interrupt is not None:
        raise interrupt
    if limit.is_over and (error is None or code.is_cancelled):
        raise limit.deadline.error()
    if error is None:
        raise CallError(f"{code.what} was cancelled: the runtime is closing")
    raise CallError(describe(error)) from error


async def attempt_at_once(action: Callable[..., Awaitable[T]], *args: object) -> T:
    """`attempt` of what ends in the step in which it begins: no deadline could reach it.

    Raises:
        CallError: As in `attempt`.
    """
    try:
        return await action(*args)
    except BaseException as error:
        _let_pass(error)
        raise CallError(describe(error)) from error


def _let_pass(error: BaseException) -> None:
    """Raise what of an action's error is not its own; see `find_propagating`."""
    passing = find_propagating(error)
    if passing is error:
        raise error
    if passing is not None:
        raise passing from None


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


async def run_side_by_side(jobs: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Run the jobs at the same time, each in a task of its own, and wait for all.

    Each is begun before the next one: what jobs do before they first wait happens in their order.
    A KeyboardInterrupt ends the others and is raised here, as itself: raised within a task, it
    would leave trio as a group and stop an asyncio loop where it stands. So does the
    `UnresponsiveError` of a job that was given up.
    """
    failures: list[BaseException] = []
    async with anyio.create_task_group() as group:

        async def run(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
            try:
                await job()
            except (KeyboardInterrupt, UnresponsiveError) as failure:
                failures.append(failure)
                group.cancel_scope.cancel()

        for position, job in enumerate(jobs):
            if position:
                await anyio.lowlevel.checkpoint()  # trio shuffles what is ready at the same time
            group.start_soon(run, job)
    if failures:
        raise failures[0]
