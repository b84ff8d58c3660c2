"""Foreign code in tasks of the runtime's, so that nobody waits for code that does not end.

Agents, tools, simulated users and rewards run behind `Contained.run`: each in a task of one group,
while the task that wants the result waits for a report. Code that is still there `cleanup_s` after
its cancellation is reported as unresponsive. Such code is closed once something would resume it,
and its task is parked until the runtime closes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import anyio
import anyio.lowlevel

from rollout.bridge import loop_clock
from rollout.scopes import open_task_group
from rollout.wait_places import describe_place, find_frames

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
    from types import FrameType

    from anyio.abc import TaskGroup, TaskStatus

logger = logging.getLogger("rollout")

T = TypeVar("T")

#: How many waits in the clean-up of stopped code are broken off.
_MOST_THROWS = 10
#: The containment of this task, and the contained code that this task runs.
_containment: ContextVar[Containment | None] = ContextVar("rollout_containment", default=None)
_around: ContextVar[Contained[Any] | None] = ContextVar("rollout_contained", default=None)


class UnresponsiveError(Exception):
    """Foreign code did not end when it was cancelled."""


class _Stopped(BaseException):
    """Ends code that was stopped, wherever it waits."""


class StoppableCoroutine(Generator[Any, Any, Any]):
    """Awaits a coroutine; where that is to be resumed after `is_stopped`, parks in its place."""

    __slots__ = ("_containment", "coroutine", "is_stopped")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], containment: Containment) -> None:
        self.coroutine, self.is_stopped, self._containment = coroutine, False, containment

    def __await__(self) -> StoppableCoroutine:
        return self

    def send(self, value: Any) -> Any:
        """Resume it."""
        try:
            return self._replace() if self.is_stopped else self.coroutine.send(value)
        finally:
            del value  # an error that was sent refers to this frame

    def throw(self, *error: Any) -> Any:
        """Resume it with an error."""
        try:
            return self._replace() if self.is_stopped else self.coroutine.throw(*error)
        finally:
            del error

    def _replace(self) -> Any:
        # Each throw breaks off a wait of its clean-up: `close` alone would leave async generators,
        # and so context managers, half open.
        for _ in range(_MOST_THROWS):
            with suppress(BaseException):
                self.coroutine.throw(_Stopped)
        self.coroutine, self.is_stopped = self._containment.park(), False
        return self.coroutine.send(None)


class Contained(Generic[T]):
    """One piece of foreign code, in a task of its own.

    Args:
        containment: Has its task.
        what: What the code is, for messages.
        activity: Whose work it is, where the event loop is found blocked.

    Attributes:
        scope: Ends it at a deadline; before that, call `cancel`.
        value, error: What it returned, or raised.
        was_cancelled: Whether `cancel` or the deadline ended it.
        unresponsive: Set where it, or code that it waited for, was stopped.
        inner: The contained code that it waits for.
        find_frames_elsewhere: The frames of code in another thread that it waits for.
        since: When it began, on the loop's clock.
        reported: Set when nobody waits for it any more; another one after `pause`.
    """

    def __init__(self, containment: Containment, what: str, activity: object = None) -> None:
        self.what, self.since, self._around = what, containment.clock(), _around.get()
        self.scope, self.reported = anyio.CancelScope(), anyio.Event()
        self.value: T | None = None
        self.error: BaseException | None = None
        self.was_cancelled = False
        self.unresponsive: UnresponsiveError | None = None
        self.inner: tuple[Contained[Any], ...] = ()
        self.find_frames_elsewhere: Callable[[], list[FrameType]] = list
        self._containment, self._activity = containment, activity
        self._cancelled_at = math.inf
        self._body: StoppableCoroutine | None = None  # while its task runs
        self._continued: anyio.Event | None = None  # once it has paused

    def cancel(self) -> None:
        """Cancel the code."""
        self.scope.cancel()
        self._cancelled_at = min(self._cancelled_at, self._containment.clock())

    @property
    def ends_at(self) -> float:
        """When its time to end begins, or began; infinite where nobody waits for it."""
        if self.reported.is_set():
            return math.inf
        return self._cancelled_at if self._cancelled_at < math.inf else self.scope.deadline

    def place(self) -> str:
        """File and line where the code waits; empty once it has ended."""
        if self._body is None:
            return ""
        return describe_place([*find_frames(self._body.coroutine), *self.find_frames_elsewhere()])

    async def run(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Run `function` until it has ended or was stopped, and return its value.

        The attributes say how it ended. Code that is paused continues in place of the function.
        Cancellation of the caller passes on to the code, and leaves after that.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._continued is None:
            self._body = StoppableCoroutine(function(), self._containment)
            if self._around is not None:
                self._around.inner += (self,)
            self._containment.present[self] = None
            self._containment.tasks.start_soon(self._serve, name=self.what)
        elif self._body is None:
            return self.value  # the runtime closes, and has ended it already
        else:
            self.reported = anyio.Event()
            self._continued.set()
        del function  # a partial, whose arguments the coroutine has
        reported = self.reported  # `pause` makes another one
        try:
            await reported.wait()
        except BaseException as error:
            if not reported.is_set():  # else it has ended, or paused: it continues uncancelled
                self.cancel()
                self._delay_outer()
            if not isinstance(error, GeneratorExit | _Stopped):
                with anyio.CancelScope(shield=True):
                    await reported.wait()
            raise
        return self.value

    @property
    def has_stuck_outer(self) -> bool:
        """Whether what waits for it is unresponsive because of it."""
        return self._around is not None and self._around.unresponsive is self.unresponsive

    def mark_outer(self) -> None:
        """Where it was stopped, note that what waits for it has not ended either."""
        if self._around is not None:
            self._around.unresponsive = self._around.unresponsive or self.unresponsive

    async def pause(self) -> None:
        """Within the code: have `run` return already, and wait for the next one.

        What the code has open, such as a task group, belongs to its task, which goes on. The wait
        ends too where the runtime closes.
        """
        self.scope.deadline = math.inf
        self._report()
        self._around, self._continued = None, anyio.Event()
        with anyio.CancelScope(shield=True):
            await self._continued.wait()

    def end(self) -> None:
        """Cancel the code, also where it is paused: the runtime closes."""
        self.cancel()
        if self._continued is not None:
            self._continued.set()

    async def _serve(self) -> None:
        """The code's task: runs it, and reports how it ended."""
        activity = self._activity  # noqa: F841  (see `observe.blocking_code`)
        assert self._body is not None
        try:
            with self.scope:
                _around.set(self)  # only here: asyncio's timers keep the context they began in
                try:
                    self.value = await self._body
                except BaseException as error:
                    self.error = error
                    raise
        except BaseException as error:
            if error is self.error or not isinstance(error, RuntimeError):
                self.error = error
            else:  # it left scopes open, which would end more than its task
                self._report()
                await self._containment.park()
        else:
            self.was_cancelled = self.scope.cancelled_caught
            self.error = None  # it was this scope's cancellation
        finally:
            self._body = None  # which holds this object, and so what the code returned
            self._report()
            del self._containment.present[self]
            del self  # whose error refers to this frame

    def stop(self) -> None:
        """Report the code as unresponsive, and never resume it."""
        self.unresponsive = UnresponsiveError(
            f"{self.what} did not end within limits.cleanup_s = {self._containment.cleanup_s:g} s "
            f"of its cancellation and was given up; it waits at {self.place()}"
        )
        assert self._body is not None
        self._body.is_stopped = True
        self._delay_outer()
        self._report()

    def _delay_outer(self) -> None:
        """Have what waits for it, and is ending too, begin to end now: until now it could not."""
        now, code = self._containment.clock(), self._around
        while code is not None and code.ends_at <= now:
            code._cancelled_at = now
            code.unresponsive = code.unresponsive or self.unresponsive
            code = code._around

    def _report(self) -> None:
        if self._around is not None:
            self._around.inner = tuple(x for x in self._around.inner if x is not self)
        self.reported.set()


@contextmanager
def note_where_it_waits(find_frames: Callable[[], list[FrameType]]) -> Iterator[None]:
    """Have contained code be placed by these frames, of another thread, while it waits here."""
    code = _around.get()
    if code is None:
        yield
        return
    code.find_frames_elsewhere = find_frames
    try:
        yield
    finally:
        code.find_frames_elsewhere = list


class Containment:
    """Has the tasks of foreign code; made by `open_containment`.

    Attributes:
        cleanup_s: How long after its cancellation code is reported as unresponsive.
        clock: The loop's.
        tasks: Has one for each of `present`.
        present: Code whose task has not ended, in the order in which it began.
        closing: Set when the runtime closes.
        is_delayed: Set when closing waits for code that cannot be stopped.
    """

    def __init__(self, cleanup_s: float) -> None:
        self.cleanup_s, self.clock = cleanup_s, loop_clock()
        self.present: dict[Contained[Any], None] = {}
        self.closing, self.is_delayed = anyio.Event(), anyio.Event()
        self.tasks: TaskGroup

    def describe_rest(self) -> str:
        """The code that has not ended, with the lines at which it waits."""
        return ", ".join(f"{code.what} at {code.place()}" for code in self.present)

    async def own_tasks(self, *, task_status: TaskStatus[None]) -> None:
        """Own the tasks until `closing` is set; then end what is left, and wait for it."""
        with anyio.CancelScope(shield=True):
            async with open_task_group() as watching:
                watching.start_soon(self._stop_late_code)
                try:
                    async with anyio.create_task_group() as self.tasks:
                        task_status.started()
                        await self.closing.wait()
                        watching.start_soon(self._name_rest)
                        for code in self.present:
                            code.end()
                        for code in tuple(self.present):
                            await code.reported.wait()
                        self.tasks.cancel_scope.cancel()  # also what code has left running
                except* RuntimeError:
                    pass  # the loop complains about scopes that stopped code has left open

    async def park(self) -> None:
        """Wait until the runtime closes, in the task of code that was stopped."""
        with anyio.CancelScope(shield=True):
            await self.closing.wait()

    async def _stop_late_code(self) -> None:
        """Stop code whose time to end is over; what began last first, as others wait for it."""
        while True:
            # Code that is cancelled from now on has `cleanup_s` to end: it is seen in time.
            first = min((code.ends_at for code in self.present), default=math.inf)
            due = min(first, self.clock()) + self.cleanup_s
            await anyio.sleep_until(due)
            # Where the loop was late, so was the code: it gets that time too.
            late_s = self.clock() - due
            await anyio.sleep(late_s)
            now = self.clock() - late_s
            for code in reversed(self.present):
                if code.ends_at + self.cleanup_s <= now:
                    code.stop()

    async def _name_rest(self) -> None:
        """Log each second what closing waits for: code that shields itself, or awaits a thread."""
        while True:
            await anyio.sleep(1.0)
            self.is_delayed.set()
            logger.warning("closing waits for %s", self.describe_rest())


@asynccontextmanager
async def open_containment(cleanup_s: float) -> AsyncIterator[Containment]:
    """Run foreign code in a group of its own; the end cancels what is left, and waits for it."""
    containment = Containment(cleanup_s)
    token = _containment.set(containment)
    async with open_task_group() as tasks:
        try:
            with anyio.CancelScope(shield=True):
                await tasks.start(containment.own_tasks)
            yield containment
        finally:
            _containment.reset(token)
            containment.closing.set()


def enter_containment(containment: Containment | None) -> None:
    """Have foreign code that this task runs go to this containment.

    To none in other threads, which have another loop, or none.
    """
    _containment.set(containment)
    _around.set(None)


def current_containment() -> Containment | None:
    """The runtime's; None outside of one."""
    return _containment.get()


@asynccontextmanager
async def containment_here() -> AsyncIterator[Containment]:
    """The containment of this task; one for the block where it has none."""
    found = _containment.get()
    if found is not None:
        yield found
        return
    async with open_containment(5.0) as containment:
        yield containment


async def call_foreign(function: Callable[[], Awaitable[T]]) -> T:
    """Await what foreign code returns, which may be another awaitable than a coroutine."""
    return await function()


async def contain(what: str, function: Callable[[], Awaitable[T]]) -> T:
    """Run `function`, foreign code, in a task of its own, and return its value.

    Raises:
        UnresponsiveError: The caller was cancelled, and the code did not end.
        BaseException: What it raised.
    """
    async with containment_here() as containment:
        code: Contained[T] = Contained(containment, what)
        try:
            value = await code.run(partial(call_foreign, function))
        finally:
            code.mark_outer()
        if (error := code.unresponsive or code.error) is not None:  # it may have a length, of 0
            raise error
        return cast("T", value)
