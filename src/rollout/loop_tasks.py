"""Tasks that need not be waited for, and what makes a task run whatever it waits for."""

from __future__ import annotations

import asyncio  # noqa: TID251  (its tasks)
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from contextvars import Context
from functools import cache, partial
from typing import Any, NoReturn, Protocol, cast

import anyio

from rollout.bridge import runs_on_trio


class TaskCode(Protocol):
    """What a task runs in place of a coroutine."""

    def send(self, value: Any) -> Any:
        """Resume it."""

    def throw(self, *error: Any) -> Any:
        """Resume it with an error."""

    def __await__(self) -> Any: ...

    def runs_in(self, task: Any) -> None:
        """This task of the event loop runs it."""


#: Starts a task, given its code, its name and its context variables.
StartTask = Callable[[TaskCode, str, Context], object]


def open_apart() -> AbstractAsyncContextManager[StartTask]:
    """Gives what starts a task that need not be waited for; it has to contain its exceptions.

    On trio nothing waits for it, since it may wait for what cannot be interrupted. On asyncio,
    where everything can, it belongs to the block. What it runs is told which task that is.
    """
    return nullcontext(_start_on_trio) if runs_on_trio() else _apart_on_asyncio()


def _start_on_trio(code: TaskCode, name: str, context: Context) -> None:
    import trio

    _let_ctrl_c_through(type(code))
    task = trio.lowlevel.spawn_system_task(lambda: code, name=name, context=context)
    code.runs_in(task)


@cache
def _let_ctrl_c_through(kind: type[TaskCode]) -> None:
    """Ctrl-C is to reach such code as it reaches the code of any other task."""
    import trio

    for method in (kind.send, kind.throw):
        trio.lowlevel.disable_ki_protection(method)


@asynccontextmanager
async def _apart_on_asyncio() -> AsyncIterator[StartTask]:
    shields: dict[anyio.CancelScope, None] = {}
    async with anyio.create_task_group() as tasks:

        def start(code: TaskCode, name: str, context: Context) -> None:
            context.run(partial(tasks.start_soon, _contain, code, name, shields))

        try:
            yield start
        finally:  # what ends the block by force reaches those that still run
            for scope in tuple(shields):
                scope.shield = False


async def _contain(code: TaskCode, name: str, shields: dict[anyio.CancelScope, None]) -> None:
    """Keep what a task does to its own group from all others, and their cancellation from it."""
    # What is in the group is anyio's word on scopes that the task did not leave.
    with suppress(BaseExceptionGroup), anyio.CancelScope(shield=True) as shield:
        shields[shield] = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_run_on_asyncio, code, name=name)
        finally:
            del shields[shield]


async def _run_on_asyncio(code: TaskCode) -> None:
    code.runs_in(asyncio.current_task())
    await code


def can_enclose() -> bool:
    """Whether this event loop is trio's, of a version that `enclose` knows."""
    return runs_on_trio() and _knows_trio()


@cache
def _knows_trio() -> bool:
    import trio
    from trio._core import _run

    needed: dict[Any, tuple[str, ...]] = {
        getattr(_run, "CancelStatus", None): ("parent",),
        trio.CancelScope: ("_cancel_status", "_has_been_entered"),
        trio.lowlevel.Task: ("_cancel_status", "_activate_cancel_status"),
    }
    return all(hasattr(owner, name) for owner, names in needed.items() for name in names)


class Interruptible:
    """A task that can be made to run, whatever it waits for."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: Any = None

    def runs_in(self, task: Any) -> None:
        """It is this one."""
        self._task = task

    def runs_here(self) -> None:
        """It is the one that calls."""
        if runs_on_trio():
            import trio

            self._task = trio.lowlevel.current_task()
        else:
            self._task = asyncio.current_task()

    def forget(self) -> None:
        """It has ended; a task whose context refers to it is then freed without the collector."""
        self._task = None

    def interrupt(self, error: BaseException, replace: Callable[[Any], Any]) -> None:
        """Have it run soon, whatever shields it; nothing is lost where it is about to run.

        A task of trio that waits for what cannot be aborted, such as a thread, stays as it is.

        Args:
            error: What is delivered on trio; asyncio knows its CancelledError only.
            replace: What trio resumes in place of the coroutine of each task that it has started.
        """
        if isinstance(self._task, asyncio.Task):
            self._task.cancel()
        elif self._task is not None:
            for nursery in self._task.child_nurseries:
                for child in nursery.child_tasks:
                    _interrupt_on_trio(child, error, replace)
            _wake_on_trio(self._task, error)

    def enclose(self) -> anyio.CancelScope:
        """A scope around all that a task of trio's runs, as if it had been entered at its start.

        A scope with its two sets is a tenth of what a waiting agent holds, and few are ever
        cancelled: so it is made when it is. Scopes that the task is in are within it from then on;
        leaving the innermost one first, trio finds each one's parent as it leaves.
        """
        import trio
        from trio._core._run import CancelStatus  # which has no public name

        scope: Any = trio.CancelScope()
        around = self._task.parent_nursery.cancel_scope._cancel_status
        scope._has_been_entered = True
        scope._cancel_status = CancelStatus(scope=scope, parent=around)
        outermost = self._task._cancel_status
        if outermost is around:
            self._task._activate_cancel_status(scope._cancel_status)
            return cast("anyio.CancelScope", scope)
        while outermost.parent not in (around, None):
            outermost = outermost.parent
        outermost.parent = scope._cancel_status
        return cast("anyio.CancelScope", scope)

    def disown_children(self) -> None:
        """Cancel the nurseries that it leaves open, and leave its scopes: trio lets it end then."""
        if self._task is not None and not isinstance(self._task, asyncio.Task):
            for nursery in self._task.child_nurseries:
                nursery.cancel_scope.cancel()
                nursery._closed = True  # as trio does, before it complains
                # Code that was closed by force may have come to wait for its children, whose end
                # must not resume a task that has ended.
                nursery._parent_waiting_in_aexit = False
            self._task._child_nurseries.clear()
            if can_enclose():
                with suppress(RuntimeError):  # it says that scopes were left open, and closes them
                    self.enclose().__exit__(None, None, None)


def _interrupt_on_trio(task: Any, error: BaseException, replace: Callable[[Any], Any]) -> None:
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            _interrupt_on_trio(child, error, replace)
    task.coro = replace(task.coro)
    _wake_on_trio(task, error)


def _wake_on_trio(task: Any, error: BaseException) -> None:
    def raise_error() -> NoReturn:
        raise error

    # No public name leads there: a scope could be cancelled, but not one that shields itself.
    if task._abort_func is not None:
        task._attempt_abort(raise_error)
