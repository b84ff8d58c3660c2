"""Task groups whose body's exception leaves as itself, and what errors of foreign code mean."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import TaskGroup


def unwrap_group(error: BaseException) -> BaseException:
    """The first exception of a group, however deep, an ordinary one before others; or the error."""
    return find_exception(error, Exception) or find_exception(error) or error


def find_exception(
    error: BaseException, kind: type[BaseException] = BaseException
) -> BaseException | None:
    """The first exception of this kind, depth first through groups."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, kind) else None
    found = (find_exception(inner, kind) for inner in error.exceptions)
    return next((each for each in found if each is not None), None)


def find_propagating(error: BaseException) -> BaseException | None:
    """The part of an error of foreign code that must propagate; None if it is its own failure.

    That is Ctrl-C, and cancellation by a scope around the code. All else is the code's own: on
    asyncio, awaiting a cancelled task raises a cancellation where no scope is cancelled.
    """
    if isinstance(error, GeneratorExit):  # the coroutine is closed
        return error
    interrupt = find_exception(error, KeyboardInterrupt)
    if interrupt is not None or anyio.current_effective_deadline() > -math.inf:
        return interrupt
    return find_exception(error, anyio.get_cancelled_exc_class())


@asynccontextmanager
async def open_task_group() -> AsyncIterator[TaskGroup]:
    """A task group for the background work of its body.

    When the body ends, the tasks are cancelled and awaited. An exception of the body leaves as
    itself, not in a group; so does the first one of a task, which cancels the body.
    """
    failure: BaseException | None = None
    others: BaseException | None = None
    try:
        try:
            async with anyio.create_task_group() as tasks:
                try:
                    yield tasks
                except BaseException as error:
                    failure = error
                    raise
                finally:
                    tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            others = group.subgroup(lambda error: error is not failure)
            # The body was cancelled because a task failed, or failed by itself.
            is_victim = failure is None or isinstance(failure, anyio.get_cancelled_exc_class())
            if is_victim and others is not None:
                failure = unwrap_group(others)
        # The group's own cancelled scope may have swallowed a cancellation from outside.
        if failure is not None:
            raise failure
    finally:  # their tracebacks hold this frame, which would hold them and all that they saw
        failure = others = None
