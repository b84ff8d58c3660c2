"""Task groups whose body's exception leaves as itself."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import TaskGroup


def leaf_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception of a group, however deep; an ordinary one before a cancellation."""
    ordinary, rest = group.split(Exception)
    chosen: BaseException = ordinary if ordinary is not None else (rest or group)
    while isinstance(chosen, BaseExceptionGroup):
        chosen = chosen.exceptions[0]
    return chosen


def is_cancelled_from_outside() -> bool:
    """Whether a scope around this point is cancelled.

    Where none is, a cancellation that arrives is the raising code's own: on asyncio, awaiting a
    cancelled task raises one.
    """
    return anyio.current_effective_deadline() == -math.inf


@asynccontextmanager
async def open_task_group() -> AsyncIterator[TaskGroup]:
    """A task group for the background work of its body.

    When the body ends, the tasks are cancelled and awaited. An exception of the body leaves as
    itself, not in a group; so does the first one of a task, which cancels the body.
    """
    body_error: BaseException | None = None
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            try:
                yield tasks
            except BaseException as error:
                body_error = error
                raise
            finally:
                tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        others = group.subgroup(lambda error: error is not body_error)
        # The body was cancelled because a task failed, or failed by itself.
        is_victim = body_error is None or isinstance(body_error, anyio.get_cancelled_exc_class())
        failure = leaf_of(others) if is_victim and others is not None else body_error
    # The group's own cancelled scope may have swallowed a cancellation that came from outside.
    failure = failure or body_error
    if failure is not None:
        raise failure
