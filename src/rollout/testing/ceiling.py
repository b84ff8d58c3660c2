"""A ceiling over virtual time: a test that hangs fails, and says where each task waits.

Without one, a deadlock among tasks that set no timers stops the clock for ever, and one beside a
heartbeat lets it run for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")

#: A day and a bit: no limit of a rollout is near it.
CEILING_S = 100_000.0
#: Frames of these packages say nothing about what waits for what.
_UNTELLING = ("trio.", "anyio.", "outcome.")


class VirtualCeilingError(AssertionError):
    """Virtual time passed the ceiling: the test hangs, or waits for longer than it means to."""


async def run_below_ceiling(call: Callable[[], Awaitable[T]], ceiling_s: float) -> T:
    """What `call` returns, unless `ceiling_s` pass first; on trio only.

    At the ceiling everything is cancelled, shields included. Exceptions of `call` leave as they
    are.

    Raises:
        VirtualCeilingError: With the tree of tasks as it was at the ceiling.
    """
    __tracebackhide__ = True
    results: list[T] = []
    failure: BaseException | None = None
    tree = ""

    async def watch() -> None:
        nonlocal tree
        await anyio.sleep(ceiling_s)
        tree = task_tree()
        _lift_shields()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, name="the virtual ceiling")
        try:
            results.append(await call())
        except BaseException as error:
            failure = error
        tasks.cancel_scope.cancel()
    if tree:
        raise VirtualCeilingError(
            f"virtual time passed the ceiling of {ceiling_s:g} s: the test hangs, or waits longer "
            f"than it means to. Its tasks:\n{tree}"
        )
    if failure is not None:
        raise failure
    return results[0]


def task_tree() -> str:
    """The tasks of the running trio loop, children indented, each with the place it waits at."""
    root = trio.lowlevel.current_root_task()
    return "\n".join(_describe_tasks(root, 0)) if root is not None else ""


def _describe_tasks(task: trio.lowlevel.Task, depth: int) -> Iterator[str]:
    yield f"{'  ' * depth}{task.name}{_describe_place(task)}"
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda child: child.name):
            yield from _describe_tasks(child, depth + 1)


def _describe_place(task: trio.lowlevel.Task) -> str:
    """Where a task waits, in the innermost frame that is not of an async library."""
    place = ""
    for frame, line in task.iter_await_frames():
        if not frame.f_globals.get("__name__", "").startswith(_UNTELLING):
            place = f"  in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{line})"
    return place


def _lift_shields() -> None:
    """Let a cancellation reach every task: a shielded wait would outlast the ceiling too.

    trio has no public way to a scope that another task has entered.
    """
    tasks: list[Any] = [trio.lowlevel.current_root_task()]
    while tasks:
        task = tasks.pop()
        status = task._cancel_status
        while status is not None:
            status._scope.shield = False
            status = status._parent
        tasks += (child for nursery in task.child_nurseries for child in nursery.child_tasks)
