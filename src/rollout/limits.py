"""Deadlines that know whose they are.

A deadline is an absolute time of the running clock, computed once and passed down; an inner one is
clipped by the outer one and then carries the outer one's name. The scope that fires therefore
always says which limit of the configuration ended the work.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import msgspec

from rollout.errors import LimitExceeded
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType


#: Where a prompt bounds its agent's time. It ends the agent as its other limits do, by number of
#: turns or calls: what it has done until then counts, and is rewarded.
AGENT_TIMEOUT_S = "agent_timeout_s"
AGENT_TIMEOUT = f"extra.{AGENT_TIMEOUT_S}"


class Deadline(msgspec.Struct, frozen=True, gc=False):
    """An absolute time (`anyio.current_time`) and the limit it comes from, e.g. ``limits.tool_s``.

    Attributes:
        at: Absolute clock time; infinite where there is no limit.
        source: Path of the limit in the configuration.
        seconds: The limit itself, for messages.
    """

    at: float
    source: str
    seconds: float

    @classmethod
    def after(
        cls,
        seconds: float | None,
        source: str,
        outer: Deadline | None = None,
        *,
        now: float | None = None,
    ) -> Deadline:
        """The deadline `seconds` from `now`, or the `outer` one where that is not later.

        Args:
            now: Clock time, where the caller has just looked at the clock.
        """
        length = math.inf if seconds is None else seconds
        at = length + (anyio.current_time() if now is None else now)
        return cls(at, source, length) if outer is None or at < outer.at else outer

    def within(self, outer: Deadline) -> Deadline:
        """This one, or the `outer` one where it is not later."""
        return self if self.at < outer.at else outer

    def later(self, seconds: float, outermost: Deadline) -> Deadline:
        """The same limit `seconds` later, or `outermost` where that is not later."""
        return Deadline(self.at + seconds, self.source, self.seconds).within(outermost)

    def error(self) -> LimitExceeded:
        """What a trajectory that meets this deadline ends with."""
        return LimitExceeded(
            f"{self.source} = {self.seconds:g} s is over",
            source=self.source,
            reason=self.source.rpartition(".")[2].removesuffix("_s"),
            outcome=Outcome.LIMIT if self.source == AGENT_TIMEOUT else Outcome.DEADLINE,
        )


class HasDeadline(Protocol):
    """A cancel scope, or what has one."""

    deadline: float


class _Pause:
    """What a deadline was when the runtime let its work wait."""

    __slots__ = ("deadline", "outer", "since", "times")

    def __init__(self, deadline: Deadline, outer: Deadline | None) -> None:
        self.deadline, self.outer = deadline, outer
        self.since = anyio.current_time()
        self.times = 0


class PausableDeadline:
    """A deadline that pauses while the runtime lets its work wait.

    Only `outermost` counts the time between `pause` and `resume`, which may nest. As a context
    manager it ends one block when it is over, as `fail_at_deadline` does.

    Args:
        around: That of the work which this one is part of; it pauses with this one.

    Attributes:
        now: What counts at present.
        outer: The same of a piece of work around this one that has no scope of its own.
    """

    __slots__ = ("_around", "_outermost", "_pause", "_scope", "now", "outer")

    def __init__(
        self,
        deadline: Deadline,
        outermost: Deadline,
        around: PausableDeadline | None = None,
        *,
        outer: Deadline | None = None,
    ) -> None:
        self.now = deadline
        self.outer = outer
        self._around = around
        self._outermost = outermost
        self._scope: Any = None
        self._pause: _Pause | None = None

    def govern(self, scope: HasDeadline) -> None:
        """Keep the deadline of this scope right from now on."""
        self._scope = scope
        scope.deadline = self.now.at

    def __enter__(self) -> None:
        self._scope = anyio.CancelScope(deadline=self.now.at)
        self._scope.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        is_caught: bool | None = self._scope.__exit__(kind, error, traceback)
        if is_caught and anyio.current_time() >= self.now.at:
            raise self.now.error()
        return is_caught

    def pause(self) -> None:
        """The runtime lets it wait from now on."""
        if self._around is not None:
            self._around.pause()
        if self._pause is None:
            self._pause = _Pause(self.now, self.outer)
            self._become(self._outermost, self._outermost)
        self._pause.times += 1

    def resume(self) -> None:
        """End one `pause`."""
        if self._around is not None:
            self._around.resume()
        pause = self._pause
        assert pause is not None
        pause.times -= 1
        if pause.times == 0:
            self._pause, passed = None, anyio.current_time() - pause.since
            outer = pause.outer and pause.outer.later(passed, self._outermost)
            self._become(pause.deadline.later(passed, self._outermost), outer)

    def renew(self, deadline: Deadline, outermost: Deadline, outer: Deadline | None = None) -> None:
        """These hold from now on, or once it is resumed."""
        self._outermost = outermost
        if self._pause is None:
            self._become(deadline, outer)
        else:
            self._pause.deadline, self._pause.outer = deadline, outer
            self._pause.since = anyio.current_time()
            self._become(outermost, outermost)

    def _become(self, deadline: Deadline, outer: Deadline | None) -> None:
        if self._scope is not None and anyio.current_time() >= self.now.at:
            return  # it has fired, or does so next, which must not pass for the block's end
        self.now, self.outer = deadline, outer
        if self._scope is not None:
            self._scope.deadline = deadline.at


@contextmanager
def fail_at_deadline(deadline: Deadline) -> Iterator[anyio.CancelScope]:
    """A cancel scope that turns `deadline` into the `LimitExceeded` that names it."""
    with anyio.CancelScope(deadline=deadline.at) as scope:
        yield scope
    if scope.cancelled_caught and anyio.current_time() >= deadline.at:
        raise deadline.error()


@contextmanager
def cleanup_scope(seconds: float) -> Iterator[anyio.CancelScope]:
    """Shielded from cancellation, and bounded: clean-up runs, and it cannot hang."""
    with anyio.CancelScope(deadline=anyio.current_time() + seconds, shield=True) as scope:
        yield scope


#: That of the tool call whose code runs here, where it has one.
call_deadline: ContextVar[PausableDeadline | None] = ContextVar("rollout_call", default=None)


@contextmanager
def paused_call() -> Iterator[None]:
    """What the block waits for does not count to the tool call that it is in, if any."""
    deadline = call_deadline.get()
    if deadline is None:
        yield
        return
    deadline.pause()
    try:
        yield
    finally:
        deadline.resume()
