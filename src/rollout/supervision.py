"""Foreign code in a task that ends, whatever the code does with its cancellation.

A coroutine that catches cancellation and waits again would block every task that waits for it. Here
it is driven through a `_Drive`, which can stop resuming it. What must end by when is declared
around each piece of foreign code with `Duty`; a piece that is still there ``cleanup_s`` later is
given up together with the task it runs in. No task waits for it any longer, and it never runs
again.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Generator
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from rollout.bridge import Interruptible, cancel_scope, open_apart

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from types import FrameType, TracebackType

T = TypeVar("T")

#: How long a task that was given up has to leave. It does so at the loop's next turn, unless it
#: waits for what cannot be interrupted, such as a thread under trio: then it is left where it is.
LEAVE_S = 1.0

#: Where a coroutine waits in these says nothing about whose it is.
_LIBRARIES = {"rollout", "anyio", "trio", "asyncio", "outcome"}


class UnresponsiveError(Exception):
    """Foreign code did not end when it was cancelled, and was given up."""


class _Drive(Generator[Any, Any, Any]):
    """Runs a coroutine in place of ``await``, until it is given up."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], unresponsive: UnresponsiveError | None = None
    ) -> None:
        self._coroutine = coroutine
        self._unresponsive = unresponsive
        self.task = Interruptible()

    def __await__(self) -> _Drive:
        return self

    def send(self, value: Any) -> Any:
        if self._unresponsive is not None:
            self._leave(self._unresponsive)
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        if self._unresponsive is not None:
            self._leave(self._unresponsive)
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    @property
    def is_given_up(self) -> bool:
        return self._unresponsive is not None

    def give_up(self, unresponsive: UnresponsiveError) -> None:
        """Resume it never again; its task leaves at once where that is possible."""
        self._unresponsive = unresponsive
        self.task.interrupt(unresponsive, lambda coroutine: _Drive(coroutine, unresponsive))

    def place(self) -> str:
        """Where the coroutine waits: the innermost place in foreign code, where there is one."""
        frames = [coroutine.cr_frame for coroutine in self._chain() if coroutine.cr_frame]
        foreign = [frame for frame in frames if not _is_of_library(frame)] or frames
        return (
            f"{foreign[-1].f_code.co_filename}:{foreign[-1].f_lineno}" if foreign else "its start"
        )

    @property
    def cr_frame(self) -> Any:  # for tools that print where tasks wait
        return getattr(self._coroutine, "cr_frame", None)

    @property
    def cr_await(self) -> Any:
        return getattr(self._coroutine, "cr_await", None)

    def _leave(self, unresponsive: UnresponsiveError) -> None:
        chain = self._chain()
        try:
            self._coroutine.close()
        except BaseException:  # one swallowed this too and waits again, or a clean-up failed
            for coroutine in chain:
                _keep_for_ever(coroutine)
        self.task.disown_children()
        raise unresponsive

    def _chain(self) -> list[Any]:
        """The coroutines that wait for each other, the outermost first."""
        chain: list[Any] = []
        inner: Any = self._coroutine
        while hasattr(inner, "cr_await"):
            chain.append(inner)
            inner = inner.cr_await
        return chain


def _keep_for_ever(coroutine: Any) -> None:
    """Never let it be collected as garbage.

    It would be closed again then, at the exit of the process where no loop runs; code that catches
    whatever happens and tries again would never let the process go.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(coroutine))


def _is_of_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES


class Duty:
    """A piece of foreign code that must end in time; a context manager around it.

    Outside of a `Supervised` it does nothing.

    Args:
        what: What it is, for messages.
        at: When it is cancelled, on the loop's clock.
        grace_s: How long it may still take after a cancellation from outside.
    """

    __slots__ = ("_supervised", "at", "drive", "grace_s", "what")

    def __init__(self, what: str, at: float, *, grace_s: float = 0.0) -> None:
        self.what = what
        self.at = at
        self.grace_s = grace_s
        current = _current.get()
        self._supervised = None if current is None else current[0]
        self.drive = None if current is None else current[1]

    def __enter__(self) -> Duty:
        if self._supervised is not None:
            self._supervised.take_on(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._supervised is not None:
            self._supervised.discharge(self)


class Supervised(Generic[T]):
    """One piece of foreign code and its clean-up, in a task of their own.

    Args:
        what: What the code is, for messages.
        cleanup_s: How long after its deadline, or its cancellation, code is given up.

    Attributes:
        unresponsive: Why code was given up, the first time; None if all ended by itself.
        was_cancelled: Whether `cancel` or the deadline ended the code before its end.
    """

    def __init__(self, what: str, *, cleanup_s: float) -> None:
        self.unresponsive: UnresponsiveError | None = None
        self.was_cancelled = False
        self._what = what
        self._cleanup_s = cleanup_s
        self._scope = cancel_scope()
        self._own: Duty | None = None
        self._duties: list[Duty] = []
        self._alarm: anyio.CancelScope | None = None
        self._ended = anyio.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    @property
    def deadline(self) -> float:
        """When the code is cancelled; may be changed while it runs."""
        return self._scope.deadline

    @deadline.setter
    def deadline(self, at: float) -> None:
        self._scope.deadline = at
        if self._own is not None:
            self._own.at = at
            self._look_at(at)

    def take_on(self, duty: Duty) -> None:
        """See that it ends in time, from now on."""
        self._duties.append(duty)
        self._look_at(duty.at)

    def discharge(self, duty: Duty) -> None:
        """It has ended."""
        if duty in self._duties:  # given up, where it leaves late
            self._duties.remove(duty)

    def cancel(self) -> None:
        """Cancel the code, not its clean-up."""
        self._scope.cancel()
        now = anyio.current_time()
        for duty in self._duties:
            duty.at = min(duty.at, now + duty.grace_s)
        self._look_at(now)

    async def run(
        self,
        function: Callable[[], Awaitable[T]],
        clean_up: Callable[[], Awaitable[object]] | None = None,
    ) -> T | None:
        """What `function` returns; None where it was cancelled, or given up as `unresponsive` says.

        Cancellation of the caller passes on to the code, and leaves when code and clean-up have
        ended or were given up.

        Args:
            function: The foreign code.
            clean_up: Runs after it in the same task, beyond the reach of `cancel`; shields itself.
        """
        drive = _Drive(self._both(function, clean_up))
        async with open_apart() as start:
            start(partial(self._drive, drive))
            try:
                await self._until_ended(drive)
            except BaseException:
                self.cancel()
                try:
                    with anyio.CancelScope(shield=True):
                        await self._until_ended(drive)
                finally:  # on asyncio a second Task.cancel waits for nothing
                    self._give_up(list(self._duties))
                raise
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and only the collector would end that
        return self._value

    async def _both(
        self,
        function: Callable[[], Awaitable[T]],
        clean_up: Callable[[], Awaitable[object]] | None,
    ) -> None:
        try:
            with self._scope, Duty(self._what, self._scope.deadline) as self._own:
                self._value = await function()
            self.was_cancelled = self._scope.cancelled_caught
        finally:
            self._own = None
            if clean_up is not None and not is_given_up():
                await clean_up()

    async def _drive(self, drive: _Drive) -> None:
        _current.set((self, drive))
        drive.task.is_this()
        try:
            await drive
        except UnresponsiveError as error:
            self.unresponsive = self.unresponsive or error
        except BaseException as error:
            self._error = error
        finally:
            drive.task.forget()
            self._ended.set()

    async def _until_ended(self, drive: _Drive) -> None:
        """Wait for the task, and give up what should have ended long ago."""
        while not self._ended.is_set():
            due = min((duty.at for duty in self._duties), default=math.inf) + self._cleanup_s
            with cancel_scope(due) as self._alarm:
                await self._ended.wait()
                return
            now = anyio.current_time()
            self._give_up([duty for duty in self._duties if duty.at + self._cleanup_s <= now])
            if drive.is_given_up:
                self._give_up(list(self._duties))  # what it had begun in tasks of their own
                with anyio.move_on_after(LEAVE_S):
                    await self._ended.wait()
                return

    def _give_up(self, overdue: list[Duty]) -> None:
        # What runs in a task of its own knows better than its caller where it waits.
        own = None if self._own is None else self._own.drive
        for duty in sorted(overdue, key=lambda duty: duty.drive is own):
            drive = duty.drive
            if drive is not None and duty in self._duties:
                self._duties[:] = [each for each in self._duties if each.drive is not drive]
                place = drive.place()
                unresponsive = UnresponsiveError(
                    f"{duty.what} did not end within limits.cleanup_s = {self._cleanup_s:g} s of "
                    f"its cancellation and was given up; it waits at {place}"
                )
                self.unresponsive = self.unresponsive or unresponsive
                drive.give_up(unresponsive)

    def _look_at(self, at: float) -> None:
        if self._alarm is not None and at + self._cleanup_s < self._alarm.deadline:
            self._alarm.deadline = at + self._cleanup_s


#: What supervises the code that runs here, and what drives it.
_current: ContextVar[tuple[Supervised[Any], _Drive] | None] = ContextVar(
    "rollout_supervised", default=None
)


def is_given_up() -> bool:
    """Whether the code that runs here is being closed by force, and must not wait any more."""
    current = _current.get()
    return current is not None and current[1].is_given_up


async def in_own_task(job: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What `job` returns; the task is its own, so that giving it up ends nothing else.

    Raises:
        UnresponsiveError: It was given up.
    """
    current = _current.get()
    if current is None:
        return await job()
    drive = _Drive(job())
    _current.set((current[0], drive))
    drive.task.is_this()
    try:
        result: T = await drive
    finally:
        drive.task.forget()
    return result
