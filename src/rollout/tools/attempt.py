"""Running foreign code: whatever it raises becomes one failure, and cancellation passes."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel

from rollout.bridge import cancel_scope, native_cancellations
from rollout.drives import UnresponsiveError
from rollout.errors import LimitExceeded, ToolError
from rollout.limits import PausableDeadline, call_deadline
from rollout.scopes import first_leaf, passing_of
from rollout.supervised import Duty, in_own_task, is_given_up
from rollout.types import text_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from rollout.limits import Deadline

T = TypeVar("T")

#: Characters of an exception's message that the model sees.
MAX_MESSAGE = 500


class CallError(Exception):
    """A tool raised; the text says what, for the model. The exception itself is the cause."""

    @property
    def root(self) -> BaseException:
        """What was raised, out of any groups around it."""
        cause = self.__cause__ or self
        return first_leaf(cause) or cause

    def after(self, tries: int) -> CallError:
        """The same, said of the last of so many attempts."""
        return CallError(f"{self} (after {tries} attempts)")


async def attempt(
    action: Callable[..., Awaitable[T]],
    *args: object,
    deadline: Deadline,
    what: str,
    shield: bool = False,
    owns_task: bool = False,
    grace_s: float | None = None,
    outer: Deadline | None = None,
) -> T:
    """What ``action(*args)`` returns.

    Cancellation from outside and KeyboardInterrupt pass through as themselves, also out of the
    groups that a tool's own task groups may wrap them in.

    Args:
        action: Runs within `deadline`.
        what: What it is, for the message where it has to be given up.
        shield: Holds cancellation from outside off.
        owns_task: The task was made for this action, so that a cancellation of the task which no
            scope asked for is the action's own doing.
        grace_s: How long it may take after a cancellation from outside; where it is shielded, until
            its deadline.
        outer: Up to where the deadline is put off while the runtime lets the action wait; None: it
            is not.

    A cancellation that was not requested is the action's own in any case: on asyncio, awaiting a
    cancelled task raises one.

    Raises:
        CallError: It raised anything else, SystemExit included.
        LimitExceeded: `deadline` passed; the action was cancelled, and has ended.
    """
    cancellations = 0 if owns_task else native_cancellations()
    if grace_s is None:
        grace_s = math.inf if shield else 0.0
    clock = None if outer is None else PausableDeadline(deadline, outer)
    try:
        with (
            Duty(what, deadline.fires_at, grace_s=grace_s) as duty,
            cancel_scope(deadline.fires_at, shield=shield) as scope,
        ):
            if clock is None:
                return await action(*args)
            clock.govern(_Bounds(scope, duty))
            token = call_deadline.set(clock)
            try:
                return await action(*args)
            finally:
                with suppress(ValueError):  # it is closed by force, from elsewhere
                    call_deadline.reset(token)
    except BaseException as error:
        _let_pass(error, is_unasked=owns_task or native_cancellations() == cancellations)
        deadline = deadline if clock is None else clock.now
        if not (scope.cancel_called and anyio.current_time() >= deadline.at):
            raise CallError(describe(error)) from error
    raise deadline.error()


class _Bounds:
    """What ends an action at its deadline, and what sees that it has ended then."""

    __slots__ = ("_duty", "_scope")

    def __init__(self, scope: Any, duty: Duty) -> None:
        self._scope, self._duty = scope, duty

    @property
    def deadline(self) -> float:
        """When it is cancelled."""
        at: float = self._scope.deadline
        return at

    @deadline.setter
    def deadline(self, at: float) -> None:
        self._scope.deadline = at
        if self._duty.drive is not None:
            self._duty.drive.owner.put_off(self._duty, at)


async def attempt_at_once(action: Callable[..., Awaitable[T]], *args: object) -> T:
    """`attempt` of what ends in the step in which it begins: no deadline could reach it.

    Raises:
        CallError: As in `attempt`.
    """
    try:
        return await action(*args)
    except BaseException as error:
        _let_pass(error, is_unasked=True)
        raise CallError(describe(error)) from error


def _let_pass(error: BaseException, *, is_unasked: bool) -> None:
    """Raise what of an action's error is not its own; see `passing_of`."""
    passing = error if is_given_up() else passing_of(error, is_unasked=is_unasked)
    if passing is error:
        raise error
    if passing is not None:
        raise passing from None


async def attempt_unhurried(
    action: Callable[[], Awaitable[T]],
    deadline: Deadline,
    *,
    what: str,
    grace_s: float,
    outer: Deadline | None = None,
) -> T:
    """`attempt`, except that cancellation from outside leaves `action` another `grace_s`.

    What an action has begun to acquire by then it can finish acquiring, and its owner can release
    it. Afterwards the cancellation passes. (On asyncio a bare `Task.cancel` does not wait.)
    """
    await anyio.lowlevel.checkpoint_if_cancelled()
    outcome: list[T] = []
    failure: BaseException | None = None

    async def end_after_cancellation() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            scope.deadline = min(scope.deadline, anyio.current_time() + grace_s)

    async with anyio.create_task_group() as group:
        with anyio.CancelScope(shield=True) as scope:
            group.start_soon(end_after_cancellation)
            try:
                got = await attempt(
                    action, deadline=deadline, what=what, grace_s=grace_s, outer=outer
                )
                outcome.append(got)
            except (CallError, LimitExceeded, KeyboardInterrupt) as error:
                failure = error  # raised here it would leave in a group
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return outcome[0]


def describe(error: BaseException) -> str:
    """One short text for the model: type and message; a `ToolError` speaks for itself."""
    leaf = first_leaf(error) or error
    message = text_of(leaf)
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "…"
    if isinstance(leaf, ToolError) and message:
        return message
    name = type(leaf).__name__
    return f"{name}: {message}" if message else name


async def run_side_by_side(jobs: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Run the jobs at the same time, each in a task of its own, and wait for all.

    Each is begun before the next one: what jobs do before they first wait happens in their order.
    A KeyboardInterrupt ends the others and is raised here, as itself: raised within a task, it
    would leave trio as a group and stop an asyncio loop where it stands. So does the
    `UnresponsiveError` of a job that was given up.
    """
    failures: list[BaseException] = []
    async with anyio.create_task_group() as group:

        async def run(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
            try:
                await in_own_task(job)
            except (KeyboardInterrupt, UnresponsiveError) as failure:
                failures.append(failure)
                group.cancel_scope.cancel()

        for position, job in enumerate(jobs):
            if position:
                await anyio.lowlevel.checkpoint()  # trio shuffles what is ready at the same time
            group.start_soon(run, job)
    if failures:
        raise failures[0]
