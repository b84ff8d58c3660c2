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

from rollout.bridge import loop_clock
from rollout.scopes import open_task_group
from rollout.wait_places import describe_place

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
    """Awaits a coroutine until that is stopped, and `parked` from then on."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], parked: Callable[[], Coroutine[Any, Any, Any]]
    ) -> None:
        self.coroutine: Any = coroutine
        self.is_stopped = False
        self._parked: Callable[[], Coroutine[Any, Any, Any]] | None = parked

    def __await__(self) -> StoppableCoroutine:
        return self

    def send(self, value: Any) -> Any:
        """Resume it."""
        return self._park() if self._must_park() else self.coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Resume it with an error."""
        return self._park() if self._must_park() else self.coroutine.throw(*error)

    def _must_park(self) -> bool:
        return self.is_stopped and self._parked is not None

    def _park(self) -> Any:
        assert self._parked is not None
        stopped, self.coroutine, self._parked = self.coroutine, self._parked(), None
        # `close` alone leaves async generators half open whose clean-up waits. What is left then
        # is freed here, and Python prints a line: at exit it would be closed again, and spin.
        for end in (*[partial(stopped.throw, _Stopped)] * _MOST_THROWS, stopped.close):
            if stopped.cr_frame is not None:
                with suppress(BaseException):  # its clean-up failed, or waits
                    end()
        return self.coroutine.send(None)


def await_frames(coroutine: Any) -> list[FrameType]:
    """The frames of what waits for each other, from this coroutine in; also of a running one.

    They end where an async generator is iterated: Python does not say what such a step waits for.
    """
    frames: list[FrameType | None] = []
    while coroutine is not None:
        frames.append(getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None))
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return [frame for frame in frames if frame is not None]


@contextmanager
def note_where_it_waits(find_frames: Callable[[], list[FrameType]]) -> Iterator[None]:
    """Have contained code be placed by these frames, of another thread, while it waits here."""
    code = _around.get()
    if code is not None:
        code.find_frames_elsewhere = find_frames
    try:
        yield
    finally:
        if code is not None:
            code.find_frames_elsewhere = list


class Contained(Generic[T]):
    """One piece of foreign code, in a task of its own.

    Args:
        containment: Has its task.
        what: What the code is, for messages.
        deadline: When it is cancelled, on the loop's clock.
        activity: Whose work it is, where the event loop is found blocked.

    Attributes:
        unresponsive: Why nobody waits for it any more; None where it ended by itself.
        was_cancelled: Whether `cancel` or the deadline ended it.
        value, error: What it returned, or raised.
        stopped_within: The first code that it waited for and that was unresponsive.
        around, inner: The code that waits for it; and what it waits for.
        since: When it began, on the loop's clock.
        find_frames_elsewhere: The frames of code in another thread that it waits for.
    """

    def __init__(
        self,
        containment: Containment,
        what: str,
        deadline: float = math.inf,
        activity: object = None,
    ) -> None:
        self.what, self.since = what, containment.clock()
        self.unresponsive: UnresponsiveError | None = None
        self.stopped_within: UnresponsiveError | None = None
        self.was_cancelled = False
        self.value: T | None = None
        self.error: BaseException | None = None
        self.around = _around.get()
        self.inner: dict[Contained[Any], None] = {}
        self.find_frames_elsewhere: Callable[[], list[FrameType]] = list
        self._containment, self._activity = containment, activity
        self._scope = anyio.CancelScope(deadline=deadline)
        #: When it was cancelled; afresh where code that it waits for was stopped.
        self._cancelled_at = math.inf
        self._body: StoppableCoroutine | None = None
        self._reported, self._is_called = anyio.Event(), anyio.Event()

    @property
    def deadline(self) -> float:
        """When the code is cancelled; may be changed while it runs."""
        return self._scope.deadline

    @deadline.setter
    def deadline(self, at: float) -> None:
        self._scope.deadline = at
        self._containment.look_at(at)

    def cancel(self) -> None:
        """Cancel the code."""
        self._scope.cancel()
        self._cancelled_at = min(self._cancelled_at, self._containment.clock())
        self._containment.look_at(self._cancelled_at)

    @property
    def ends_at(self) -> float:
        """When the code is, or was, cancelled."""
        return self._cancelled_at if self._cancelled_at < math.inf else self._scope.deadline

    @property
    def is_cancelled(self) -> bool:
        """Whether the code was cancelled, by its deadline too."""
        return self._scope.cancel_called

    def find_inner(self) -> Iterator[Contained[Any]]:
        """The contained code that it waits for, at whatever depth."""
        for code in self.inner:
            yield code
            yield from code.find_inner()

    def place(self) -> str:
        """File and line where the code waits; empty once it has ended."""
        if self._body is None:
            return ""
        return describe_place([*await_frames(self._body.coroutine), *self.find_frames_elsewhere()])

    async def run(self, function: Callable[[], Awaitable[T]], *, grace_s: float = 0.0) -> T | None:
        """Run `function` to its end: `value` is what it returned, `error` what it raised.

        The value is returned too; neither is there where `cancel` or the deadline ended it.

        Cancellation of the caller passes on to the code, `grace_s` later, and leaves once that has
        ended or was stopped.

        Raises:
            UnresponsiveError: It did not end within `cleanup_s` of its cancellation.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._containment.start(self, function)
        reported = self._reported
        try:
            await reported.wait()
        except GeneratorExit:  # of code that was stopped
            self.cancel()
            raise
        except BaseException:
            if not grace_s:
                self.cancel()
            else:
                self.deadline = min(self.deadline, self._containment.clock() + grace_s)
            with anyio.CancelScope(shield=True):
                await reported.wait()
            if self.unresponsive is not None:
                raise self.unresponsive from None
            raise
        if self.unresponsive is not None:
            raise self.unresponsive
        return self.value

    async def wait_for_call(self, close: Callable[[], Awaitable[None]]) -> None:
        """Within the code: report that it has ended so far, and call `close` once `finish` is.

        Both parts run in one task, to which whatever the first one has open belongs.
        """
        self._scope.deadline = math.inf
        self._report()
        self._reported = anyio.Event()
        with anyio.CancelScope(shield=True):
            await self._is_called.wait()
        await close()

    def release(self) -> None:
        """Have what waits in `wait_for_call` go on."""
        self._is_called.set()

    async def finish(self) -> None:
        """Have what waits in `wait_for_call` go on, and wait for its end; shielded.

        Raises:
            UnresponsiveError: It did not end within `cleanup_s` of its cancellation.
        """
        self.around = None
        self._containment.running[self] = None
        self.release()
        with anyio.CancelScope(shield=True):
            await self._reported.wait()
        if self.unresponsive is not None:
            raise self.unresponsive

    async def serve(self, function: Callable[[], Awaitable[T]]) -> None:
        """The code's task: runs it, reports how it ended, and parks where it was stopped."""
        activity = self._activity  # noqa: F841  (see `observe.blocking_code`)
        _around.set(self)
        raised: BaseException | None = None

        async def call() -> T:
            return await function()

        self._body = StoppableCoroutine(call(), self._park)
        try:
            with self._scope:
                try:
                    self.value = await self._body
                except BaseException as error:
                    raised = error
                    raise
        except BaseException as error:
            is_torn = isinstance(error, RuntimeError) and error is not raised
            if self.unresponsive is None:
                self.error = raised if is_torn else error
                self.was_cancelled = self._scope.cancel_called and is_torn and raised is not None
                self._end()
            if is_torn:  # scopes that it left open would end more than its task
                with suppress(UnresponsiveError):
                    await self._park()
        else:
            self.was_cancelled = self._scope.cancelled_caught
            self._end()

    def stop(self, now: float) -> None:
        """Report the code as unresponsive, and never resume it, where its time to end is over."""
        cleanup_s = self._containment.cleanup_s
        if self._body is None or self.ends_at + cleanup_s > now:
            return
        self.unresponsive = UnresponsiveError(
            f"{self.what} did not end within limits.cleanup_s = {cleanup_s:g} s of its "
            f"cancellation and was given up; it waits at {self.place()}"
        )
        self._body.is_stopped = True
        around = self.around
        while around is not None:
            around.stopped_within = around.stopped_within or self.unresponsive
            if around.ends_at < now:
                around._cancelled_at = now  # it waited for this
            around = around.around
        self._report()

    def _end(self) -> None:
        """Report that the code has ended, unless it was stopped before."""
        if self.unresponsive is None:
            self._body = None
        self._report()

    def _report(self) -> None:
        self._containment.forget(self)
        self._reported.set()

    async def _park(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._containment.closing.wait()
        raise UnresponsiveError(f"{self.what} was stopped")


class Containment:
    """Has the tasks of foreign code; made by `open_containment`.

    Attributes:
        cleanup_s: How long after its cancellation code is reported as unresponsive.
        clock: The loop's.
        running: Code that has not ended, in the order in which it began.
        closing: Set when the runtime closes.
        is_delayed: Set when closing waits for code that cannot be stopped.
    """

    def __init__(self, cleanup_s: float) -> None:
        self.cleanup_s, self.clock = cleanup_s, loop_clock()
        self.running: dict[Contained[Any], None] = {}
        self.closing, self.is_delayed = anyio.Event(), anyio.Event()
        self._present: dict[Contained[Any], None] = {}  # with those that were stopped
        self._left = anyio.Event()
        self._alarm = anyio.CancelScope()
        self._tasks: TaskGroup

    def start(self, code: Contained[T], function: Callable[[], Awaitable[T]]) -> None:
        """Start the task of a piece of code."""
        self.running[code] = self._present[code] = None
        if code.around is not None:
            code.around.inner[code] = None
        self.look_at(code.ends_at)
        self._tasks.start_soon(self._serve, code, function, name=code.what)

    def look_at(self, at: float) -> None:
        """Have the watcher look once `cleanup_s` has passed since that time."""
        if at + self.cleanup_s < self._alarm.deadline:
            self._alarm.deadline = at + self.cleanup_s

    def forget(self, code: Contained[Any]) -> None:
        """The code has ended, or was stopped: nobody waits for it."""
        self.running.pop(code, None)
        if code.around is not None:
            code.around.inner.pop(code, None)

    def describe_rest(self) -> str:
        """The code that has not ended, with the lines at which it waits."""
        return ", ".join(f"{code.what} at {code.place()}" for code in self._present)

    async def hold(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Own the tasks, until `closing` is set and all of them have ended."""
        try:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as self._tasks:
                    task_status.started()
                    async with open_task_group() as watching:
                        watching.start_soon(self._watch)
                        await self.closing.wait()
                        await self._cancel_all()
                    self._tasks.cancel_scope.cancel()  # also what code has left running
                    with anyio.CancelScope(shield=True):
                        await self._wait_for_rest()
        except* RuntimeError:
            pass  # the loop complains about scopes that stopped code has left open

    async def _serve(self, code: Contained[T], function: Callable[[], Awaitable[T]]) -> None:
        try:
            await code.serve(function)
        finally:
            self._present.pop(code, None)
            if not self._present:
                self._left.set()
                self._left = anyio.Event()

    async def _watch(self) -> None:
        """Stop code whose time to end is over; what began last first, as others wait for it."""
        while True:
            first = min((code.ends_at for code in self.running), default=math.inf)
            with anyio.CancelScope(deadline=first + self.cleanup_s) as self._alarm:
                await anyio.sleep_forever()
            # Where the loop was late, so was the code: it gets that time too.
            late_s = self.clock() - self._alarm.deadline
            await anyio.sleep(late_s)
            now = self.clock() - late_s
            for code in reversed(tuple(self.running)):
                code.stop(now)

    async def _cancel_all(self) -> None:
        for code in tuple(self._present):
            code.cancel()
            code.release()
        while self.running:
            await self._wait_left(self.cleanup_s)

    async def _wait_for_rest(self) -> None:
        """Log each second what cannot be stopped: code that shields itself, or awaits a thread."""
        while self._present:
            await self._wait_left(1.0)
            if self._present:
                self.is_delayed.set()
                logger.warning("closing waits for %s", self.describe_rest())

    async def _wait_left(self, at_most_s: float) -> None:
        with anyio.move_on_after(at_most_s):
            await self._left.wait()


@asynccontextmanager
async def open_containment(cleanup_s: float) -> AsyncIterator[Containment]:
    """Run foreign code in a group of its own; the end cancels what is left, and waits for it."""
    containment = Containment(cleanup_s)
    token = _containment.set(containment)
    async with open_task_group() as tasks:
        try:
            with anyio.CancelScope(shield=True):
                await tasks.start(containment.hold)
            yield containment
        finally:
            _containment.reset(token)
            containment.closing.set()


def enter_containment(containment: Containment) -> None:
    """Have foreign code that this task runs go to this containment."""
    _containment.set(containment)


def leave_containment() -> None:
    """Have foreign code that this context runs go to none: a thread has another loop, or none."""
    _containment.set(None)
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


async def contain(what: str, function: Callable[[], Awaitable[T]]) -> T:
    """Run `function`, foreign code, in a task of its own, and return its value.

    Raises:
        UnresponsiveError: The caller was cancelled, and the code did not end.
        BaseException: What it raised.
    """
    async with containment_here() as containment:
        code = Contained[T](containment, what)
        value = await code.run(function)
        if code.error is not None:
            raise code.error
        return cast("T", value)
