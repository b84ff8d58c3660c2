"""Task groups whose body's exception leaves as itself."""

from __future__ import annotations

import math
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, TypeVar

import anyio

from rollout.errors import RolloutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from anyio.abc import TaskGroup

T = TypeVar("T")


def leaf_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception of a group, however deep; an ordinary one before a cancellation."""
    ordinary, rest = group.split(Exception)
    chosen: BaseException = ordinary if ordinary is not None else (rest or group)
    while isinstance(chosen, BaseExceptionGroup):
        chosen = chosen.exceptions[0]
    return chosen


def first_leaf(
    error: BaseException, kind: type[BaseException] = BaseException
) -> BaseException | None:
    """The first exception of this kind, depth first through groups."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, kind) else None
    for inner in error.exceptions:
        leaf = first_leaf(inner, kind)
        if leaf is not None:
            return leaf
    return None


def passing_of(error: BaseException, *, is_unasked: bool = True) -> BaseException | None:
    """What of an error of foreign code is not its own, and must pass: None, or it, or a part of it.

    That is Ctrl-C, and cancellation by a scope around the code. All else is the code's own, of
    whatever type it is.

    Args:
        error: What the code raised.
        is_unasked: Whether the task itself was not cancelled, as asyncio can beside its scopes.
    """
    if isinstance(error, GeneratorExit):  # the code that this is part of is closed
        return error
    interrupt = first_leaf(error, KeyboardInterrupt)
    if interrupt is not None:
        return interrupt
    if is_unasked and not is_cancelled_from_outside():
        return None
    return first_leaf(error, anyio.get_cancelled_exc_class())


def is_cancelled_from_outside() -> bool:
    """Whether a scope around this point is cancelled.

    Where none is, a cancellation that arrives is the raising code's own: on asyncio, awaiting a
    cancelled task raises one.
    """
    return anyio.current_effective_deadline() == -math.inf


#: What those are told who use a runtime before it is open.
HOW_TO_OPEN = "write `async with rollout.open_rollout(...) as runtime:`"


class NotEnteredError(RolloutError, AttributeError):
    """A runtime is used otherwise than in the block of a `with` statement."""


class OneTask(AbstractAsyncContextManager[T]):
    """A context manager that must be left in the task that entered it; elsewhere nothing happens.

    trio would wait for ever where a task that the block waits for leaves it. Used as if it were
    what it opens, it says how it is entered.
    """

    def __init__(self, name: str, manager: AbstractAsyncContextManager[T]) -> None:
        self._name = name
        self._manager = manager
        self._task: anyio.TaskInfo | None = None

    async def __aenter__(self) -> T:
        self._task = anyio.get_current_task()
        return await self._manager.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        here = anyio.get_current_task()
        if self._task is not None and here.id != self._task.id:
            raise RolloutError(
                f"{self._name}: left in the task {here.name!r}; expected {self._task.name!r}, "
                "which entered it (an agent, a tool or a reward cannot close its own runtime)"
            )
        return await self._manager.__aexit__(kind, error, traceback)

    def _refuse_await(self) -> NoReturn:
        raise NotEnteredError(f"{self._name} is awaited; {HOW_TO_OPEN}")

    __await__ = _refuse_await

    def __enter__(self) -> NoReturn:
        raise NotEnteredError(f"{self._name} is entered by `with`; {HOW_TO_OPEN}")

    def __exit__(self, *_error: object) -> None:
        pass

    def __getattr__(self, name: str) -> NoReturn:
        raise NotEnteredError(f"{self._name}(...).{name}: it must be entered first; {HOW_TO_OPEN}")


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
        failure = _choose_failure(group, body_error)
    # The group's own cancelled scope may have swallowed a cancellation from outside.
    failure = failure or body_error
    if failure is not None:
        raise failure


def _choose_failure(
    group: BaseExceptionGroup[BaseException], body_error: BaseException | None
) -> BaseException | None:
    others = group.subgroup(lambda error: error is not body_error)
    # The body was cancelled because a task failed, or failed by itself.
    is_victim = body_error is None or isinstance(body_error, anyio.get_cancelled_exc_class())
    return leaf_of(others) if is_victim and others is not None else body_error


def give_back(limiter: anyio.CapacityLimiter, borrower: object) -> None:
    """Release the place that a borrower has, if it has one.

    Said also where the wait for it did not return: a task that is given up may be taken out of it
    with the place already its own.
    """
    with suppress(RuntimeError):
        limiter.release_on_behalf_of(borrower)


async def outwait(event: anyio.Event) -> None:
    """Wait for an event that is sure to come, whatever cancels the caller; that passes on after it.

    No shield keeps off what asyncio itself cancels, as `asyncio.timeout` does.
    """
    cancelled: BaseException | None = None
    while not event.is_set():
        try:
            with anyio.CancelScope(shield=True):
                await event.wait()
        except anyio.get_cancelled_exc_class() as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
