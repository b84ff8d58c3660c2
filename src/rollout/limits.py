"""Deadlines that know whose they are.

A deadline is an absolute time of the running clock, computed once and passed down; an inner one is
clipped by the outer one and then carries the outer one's name. The scope that fires therefore
always says which limit of the configuration ended the work.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import anyio
import msgspec

from rollout.bridge import cancel_scope
from rollout.errors import LimitExceeded
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType


class Deadline(msgspec.Struct, frozen=True):
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

    def later(self, seconds: float, outermost: Deadline) -> Deadline:
        """The same limit `seconds` later, or `outermost` where that is not later."""
        at = self.at + seconds
        return Deadline(at, self.source, self.seconds) if at < outermost.at else outermost

    def error(self) -> LimitExceeded:
        """What a trajectory that meets this deadline ends with."""
        return LimitExceeded(
            f"{self.source} = {self.seconds:g} s is over",
            source=self.source,
            reason=self.source.rpartition(".")[2].removesuffix("_s"),
            outcome=Outcome.DEADLINE,
        )


class HasDeadline(Protocol):
    """A cancel scope, or what has one."""

    deadline: float


class PausableDeadline:
    """A deadline that pauses while the runtime lets its work wait.

    Only `outermost` counts the time between `pause` and `resume`, which may nest. As a context
    manager it ends one block when it is over, as `fail_at_deadline` does.

    Args:
        around: That of the work which this one is part of; it pauses with this one.

    Attributes:
        now: What counts at present.
    """

    __slots__ = (
        "_around",
        "_entered",
        "_outermost",
        "_paused",
        "_pauses",
        "_scope",
        "_since",
        "now",
    )

    def __init__(
        self, deadline: Deadline, outermost: Deadline, around: PausableDeadline | None = None
    ) -> None:
        self.now = deadline
        self._around = around
        self._outermost = outermost
        self._scope: HasDeadline | None = None
        self._paused: Deadline | None = None
        self._pauses = 0
        self._since = 0.0

    def govern(self, scope: HasDeadline) -> None:
        """Keep the deadline of this scope right from now on."""
        self._scope = scope
        scope.deadline = self.now.at

    def __enter__(self) -> None:
        self._scope = self._entered = cancel_scope(self.now.at)
        self._entered.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        is_caught = self._entered.__exit__(kind, error, traceback)
        if is_caught and anyio.current_time() >= self.now.at:
            raise self.now.error()
        return is_caught

    def pause(self) -> None:
        """The runtime lets it wait from now on."""
        if self._around is not None:
            self._around.pause()
        self._pauses += 1
        if self._pauses == 1:
            self._since, self._paused = anyio.current_time(), self.now
            self._become(self._outermost)

    def resume(self) -> None:
        """End one `pause`."""
        if self._around is not None:
            self._around.resume()
        self._pauses -= 1
        if self._pauses == 0:
            assert self._paused is not None
            self._become(self._paused.later(anyio.current_time() - self._since, self._outermost))

    def _become(self, deadline: Deadline) -> None:
        self.now = deadline
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
