"""Running foreign code: whatever it raises becomes one failure, and cancellation passes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from rollout.containment import Contained, containment_here
from rollout.errors import ToolError
from rollout.limits import call_limit
from rollout.scopes import find_exception
from rollout.types import read_message

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollout.limits import Limit

T = TypeVar("T")

#: Characters of an exception's message that the model sees.
MAX_MESSAGE = 500


async def attempt(
    action: Callable[..., Awaitable[T]],
    *args: object,
    limit: Limit,
    what: str,
    activity: str | None = None,
) -> T:
    """Await what ``action(*args)`` returns; it runs in a task of its own.

    Args:
        action: Runs within `limit`.
        what: What it is, for messages.
        activity: Whose work it is, where it blocks the event loop.

    Raises:
        ToolError: It raised anything but KeyboardInterrupt, which is raised as itself; or `limit`
            was over, and it was cancelled. The text is for the model; its cause is what it raised.
        LimitExceeded: So was a limit around `limit`.
        UnresponsiveError: It was cancelled, and did not end.
    """
    async with containment_here() as containment:  # outside of a runtime one of its own
        code: Contained[T] = Contained(containment, what, activity)
        return await conclude(code, code.run(partial(action, *args)), limit)


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
    if error is not None and (interrupt := find_exception(error, KeyboardInterrupt)):
        raise interrupt
    if limit.is_over and (error is None or code.scope.cancel_called):
        if limit.is_outer_over:
            raise limit.deadline.error()
        raise ToolError(f"timed out after {limit.deadline.seconds:g} s ({limit.deadline.source})")
    if error is None:
        raise ToolError(f"{code.what} was cancelled: the runtime is closing")
    raise ToolError(describe(error)) from find_exception(error) or error


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
