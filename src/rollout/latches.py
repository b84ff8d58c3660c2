"""What a task awaits until another one says that it may resume, at little cost of memory."""

from __future__ import annotations

import asyncio  # noqa: TID251  (its event)
from functools import cache
from typing import Any, Protocol

from rollout.bridge import runs_on_trio


class Latch(Protocol):
    """An event that one task awaits, as in ``await latch``; it costs little memory meanwhile."""

    def set(self) -> None:
        """Let the task resume; at once where it comes later."""

    def is_set(self) -> bool:
        """Whether it was set."""

    def __await__(self) -> Any: ...


def latch_type() -> type[Latch]:
    """The class of this event loop's latches; of no use in another one."""
    return _trio_latch() if runs_on_trio() else _AsyncioLatch


class _AsyncioLatch:
    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def __await__(self) -> Any:
        return self._event.wait().__await__()


@cache
def _trio_latch() -> type[Latch]:
    import trio

    lowlevel = trio.lowlevel
    # What a task of trio yields to sleep. Nothing in it depends on the task, so that one serves all
    # of them; who abandons a wait learns by its exception, as `custom_sleep_data` says to `set`.
    sleeping = lowlevel.wait_task_rescheduled(lambda _: lowlevel.Abort.SUCCEEDED)
    sleep = sleeping.send(None)
    sleeping.close()

    class TrioLatch:
        """It is its own iterator: no coroutine waits in `trio.Event` or in trio's traps."""

        __slots__ = ("_is_set", "_task")

        def __init__(self) -> None:
            self._is_set = False
            self._task: Any = None

        def set(self) -> None:
            self._is_set = True
            # trio clears it of a task that is about to resume for another reason.
            if self._task is not None and self._task.custom_sleep_data is self:
                lowlevel.reschedule(self._task)

        def is_set(self) -> bool:
            return self._is_set

        def __await__(self) -> Any:
            if self._is_set:
                return lowlevel.checkpoint().__await__()
            self._task = lowlevel.current_task()
            self._task.custom_sleep_data = self
            return self

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            return sleep

        def send(self, outcome: Any) -> None:
            self._task = None
            try:
                outcome.unwrap()
            finally:
                del outcome  # its error's traceback holds this frame
            raise StopIteration

        def throw(self, *error: Any) -> None:
            self._task = None
            try:
                raise error[0]
            finally:
                del error

    return TrioLatch
