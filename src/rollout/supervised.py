"""Foreign code in tasks that end, whatever the code does with its cancellation.

A coroutine that catches cancellation and waits again would block every task that waits for it. Here
it is driven through a `Drive`, which can stop resuming it. What must end by when is declared
around each piece of foreign code with `Duty`; a piece that is still there ``cleanup_s`` later is
given up together with the task it runs in. No task waits for it any longer, and it never runs
again.

A piece of code costs its task and a `Supervised`: no other task waits for it, one watches all.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import anyio

from rollout.bridge import runs_on_trio
from rollout.drives import Drive, Ends, MainDrive, UnresponsiveError
from rollout.expiries import Expiring

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable
    from types import TracebackType

T = TypeVar("T")

#: How long a task that was given up has to leave. It does so at the loop's next turn, unless it
#: waits for what cannot be interrupted, such as a thread under trio: then it is left where it is.
LEAVE_S = 1.0

#: What drives the code that runs here; on trio only where that is not what its task runs, since a
#: context of its own with a value in it costs each task that waits.
driving: ContextVar[Drive[Supervised[Any]] | None] = ContextVar("rollout_drive", default=None)


class Supervisor(Protocol):
    """Sees that pieces of code end; as `Supervision` does.

    Attributes:
        cleanup_s: How long after its deadline, or its cancellation, code is given up.
        clock: The loop's.
        scopes_are_late: Whether code has a scope only once it is cancelled, and `end_at` sees to
            its deadline.
    """

    cleanup_s: float
    clock: Callable[[], float]
    scopes_are_late: bool

    def start(self, work: Supervised[Any], drive: MainDrive[Supervised[Any]], what: str) -> None:
        """Start the task of a piece of code."""

    def end(self, work: Supervised[Any]) -> None:
        """Nobody waits for a piece of code any longer."""

    def look_at(self, at: float) -> None:
        """Something is to have ended at that time."""

    def end_at(self, work: Supervised[Any], at: float) -> None:
        """Have a piece of code `expire` at that time."""


class Duty:
    """A piece of foreign code that must end in time; a context manager around it.

    Outside of a `Supervised` it does nothing.

    Args:
        what: What it is, for messages.
        at: When it is cancelled, on the loop's clock.
        grace_s: How long it may still take after a cancellation from outside.
    """

    __slots__ = ("at", "drive", "grace_s", "since", "what")

    def __init__(self, what: str, at: float, *, grace_s: float = 0.0) -> None:
        self.what = what
        self.at = at
        self.grace_s = grace_s
        self.since = 0.0  # when it began, on the loop's clock; see `take_on`
        self.drive = _current_drive()

    def __enter__(self) -> Duty:
        if self.drive is not None:
            self.drive.owner.take_on(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.drive is not None:
            self.drive.owner.discharge(self)


class Supervised(Ends, Expiring, Generic[T]):
    """One piece of foreign code, in a task of its own; a context manager around the code itself.

    What is in the block is cancelled by `cancel` and at the deadline; what comes after it in the
    same task, such as clean-up, shields itself and is bounded by duties of its own.

    Args:
        supervision: Sees that it ends.
        what: What the code is, for messages.

    Attributes:
        what: As above.
        unresponsive: Why code was given up, the first time; None if all ended by itself.
        was_cancelled: Whether `cancel` or the deadline ended the code before its end; before its
            start, whether it was cancelled already.
    """

    __slots__ = (
        "_at",
        "_deadline",
        "_duties",
        "_error",
        "_is_within",
        "_main",
        "_scope",
        "_supervision",
        "_value",
        "unresponsive",
        "was_cancelled",
        "what",
    )

    def __init__(self, supervision: Supervisor, what: str) -> None:
        super().__init__()
        self.unresponsive: UnresponsiveError | None = None
        self.was_cancelled = False
        self._supervision = supervision
        self.what = what
        self._scope: anyio.CancelScope | None = None  # on trio once it is cancelled: see `enclose`
        self._is_within: bool | None = None  # the block; None before
        self._deadline = math.inf
        self._at: float | None = None  # when the code is cancelled, while it runs
        self._duties: list[Duty] | tuple[()] = ()
        self._main: MainDrive[Supervised[Any]] | None = None  # until the task has ended
        self._value: T | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        self._is_within, self._at = True, self._deadline
        if not self._supervision.scopes_are_late:
            self._scope = anyio.CancelScope(deadline=self._deadline)
            self._scope.__enter__()
        is_cancelled, self.was_cancelled = self.was_cancelled, False
        if is_cancelled or self._deadline <= self._supervision.clock():
            self.cancel()
        else:
            self._supervision.end_at(self, self._deadline)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._is_within, self._at = False, None
        scope, self._scope = self._scope, None
        if scope is None:
            return None
        is_caught = scope.__exit__(kind, error, traceback)
        self.was_cancelled = scope.cancelled_caught
        return is_caught

    @property
    def deadline(self) -> float:
        """When the code is cancelled; may be changed while it runs."""
        return self._deadline

    @deadline.setter
    def deadline(self, at: float) -> None:
        self._deadline = at
        if self._scope is not None:
            self._scope.deadline = at
        if self._at is not None and self._at > self._supervision.clock():  # else it is cancelled
            self._at = at
            self._supervision.end_at(self, at)

    @property
    def is_over(self) -> bool:
        """Whether its task has ended, or nobody waits for it any longer."""
        return self._main is None

    def expire(self, now: float) -> None:
        """See `Expiries`."""
        if self._is_within and self._deadline > now:
            self._supervision.end_at(self, self._deadline)
        elif self._is_within:
            self._end_code()

    def start(self, code: Coroutine[Any, Any, T | None]) -> None:
        """Run the code in a task of its own; `ended` is called when that has ended."""
        self._main = MainDrive(self, code)
        self._supervision.start(self, self._main, self.what)

    def result(self) -> T | None:
        """What the code returned; None where it was cancelled, or given up as `unresponsive` says.

        What it raised is raised, once.
        """
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and only the collector would end that
        return self._value

    def cancel(self) -> None:
        """Cancel the code, not its clean-up."""
        if self._is_within is None:
            self.was_cancelled = True
        elif self._is_within:
            self._end_code()
        now = self._supervision.clock()
        if self._at is not None:
            self._at = min(self._at, now)
        for duty in self._duties:
            duty.at = min(duty.at, now + duty.grace_s)
        self._supervision.look_at(now)

    def _end_code(self) -> None:
        if self._scope is None and self._main is not None:
            self._scope = self._main.enclose()
        if self._scope is not None:  # else nobody waits for its task any longer
            self._scope.cancel()

    def take_on(self, duty: Duty) -> None:
        """See that it ends in time, from now on."""
        duty.since = self._supervision.clock()
        self._duties = [*self._duties, duty]
        self._supervision.look_at(duty.at)

    def put_off(self, duty: Duty, at: float) -> None:
        """It is cancelled at another time, unless it has been, or all of this."""
        now = self._supervision.clock()
        if duty.at > now and (self._at is None or self._at > now):
            duty.at = at
            self._supervision.look_at(at)

    def discharge(self, duty: Duty) -> None:
        """It has ended."""
        if isinstance(self._duties, list) and duty in self._duties:  # else it leaves late
            self._duties.remove(duty)

    @property
    def earliest(self) -> float:
        """When the first piece of it is cancelled; infinite where nothing is to end."""
        own = math.inf if self._at is None else self._at
        return min(own, *(duty.at for duty in self._duties)) if self._duties else own

    @property
    def duties(self) -> tuple[Duty, ...]:
        """Pieces of it that are under way, in the order in which they began."""
        return tuple(self._duties)

    def place(self) -> str:
        """File and line where the code waits; empty once its task has ended."""
        return "" if self._main is None else self._main.place()

    def give_up(self, now: float) -> None:
        """What should have ended long ago is given up, or abandoned where it was already."""
        main, cleanup_s = self._main, self._supervision.cleanup_s
        if main is None or self.earliest + cleanup_s > now:
            return
        if main.unresponsive is not None:
            self._close()
            return
        overdue = [duty for duty in self._duties if duty.at + cleanup_s <= now]
        # What runs in a task of its own knows better than its caller where it waits.
        self._give_up_duties(duty for duty in overdue if duty.drive is not main)
        if self._at is not None and self._at + cleanup_s <= now:
            self._give_up(self.what, main)
        self._give_up_duties(overdue)
        if main.unresponsive is not None:
            self._give_up_duties(self._duties)  # what it had begun in tasks of their own

    def _give_up_duties(self, duties: Iterable[Duty]) -> None:
        for duty in tuple(duties):
            if duty in self._duties and duty.drive is not None:
                self._give_up(duty.what, duty.drive)

    def _give_up(self, what: str, drive: Drive[Supervised[Any]]) -> None:
        cleanup_s = self._supervision.cleanup_s
        unresponsive = UnresponsiveError(
            f"{what} did not end within limits.cleanup_s = {cleanup_s:g} s of its cancellation and "
            f"was given up; it waits at {drive.place()}"
        )
        self.unresponsive = self.unresponsive or unresponsive
        self._duties = [each for each in self._duties if each.drive is not drive]
        if drive is self._main:
            self._at = anyio.current_time() + LEAVE_S - cleanup_s
            self._supervision.look_at(self._at)
        drive.give_up(unresponsive)

    def end(self, how: BaseException) -> None:
        """The task has ended, by this error or with the value in a StopIteration."""
        if isinstance(how, StopIteration):
            self._value = how.value
        elif isinstance(how, UnresponsiveError):
            self.unresponsive = self.unresponsive or how
        else:
            self._error = how
        self._close()

    def _close(self) -> None:
        """Nobody waits for its task any longer."""
        main, self._main = self._main, None
        if main is not None:  # else it ended after it was abandoned
            main.forget()
            self._supervision.end(self)

    def ended(self) -> None:
        """Its task has ended, or nobody waits for it any longer; called once."""


class SupervisedCall(Supervised[T]):
    """Foreign code that a task waits for."""

    __slots__ = ("_ended",)

    async def run(self, function: Callable[[], Awaitable[T]]) -> T | None:
        """What `function` returns; None where it was cancelled, or given up as `unresponsive` says.

        Cancellation of the caller passes on to the code, and leaves when that has ended or was
        given up.
        """
        self._ended = anyio.Event()
        self.start(self._within(function))
        try:
            await self._ended.wait()
        except BaseException:
            self.cancel()
            try:
                with anyio.CancelScope(shield=True):
                    await self._ended.wait()
            finally:  # on asyncio a second Task.cancel waits for nothing
                self.give_up(math.inf)
            raise
        return self.result()

    async def _within(self, function: Callable[[], Awaitable[T]]) -> T | None:
        with self:
            return await function()
        return None

    def ended(self) -> None:
        """Wake the task that waits."""
        self._ended.set()


def _current_drive() -> Drive[Supervised[Any]] | None:
    """What drives the code that runs here, or its task, or the nearest task around that."""
    drive = driving.get()
    if drive is not None or not runs_on_trio():
        return drive
    import trio

    try:
        task: Any = trio.lowlevel.current_task()
    except RuntimeError:  # of a coroutine that is closed as garbage
        return None
    while not isinstance(task.coro, MainDrive):
        if task.parent_nursery is None:
            return None
        task = task.parent_nursery.parent_task
    return task.coro


def is_given_up() -> bool:
    """Whether the code that runs here is being closed by force, and must not wait any more."""
    drive = _current_drive()
    return drive is not None and drive.unresponsive is not None


async def in_own_task(job: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What `job` returns; the task is its own, so that giving it up ends nothing else.

    Raises:
        UnresponsiveError: It was given up.
    """
    current = _current_drive()
    if current is None:
        return await job()
    drive = Drive(current.owner, job())
    driving.set(drive)
    drive.runs_here()
    try:
        result: T = await drive
    finally:
        drive.forget()
    return result
