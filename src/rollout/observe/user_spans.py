"""Spans of the user's own functions within a trajectory: the decorator `rollout.trace`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, overload

from rollout.observe.events import SpanEnded
from rollout.observe.written_values import plain
from rollout.types import format_error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextvars import Token

    from rollout.observe.event_stream import EventStream

F = TypeVar("F", bound=Callable[..., Any])


class TrajectorySpans:
    """Where functions that run for a trajectory tell of themselves, from whatever thread."""

    def __init__(self, events: EventStream, trajectory: int) -> None:
        self._events, self._trajectory, self._count = events, trajectory, 0

    @property
    def are_shown(self) -> bool:
        """Whether anybody looks at arguments and values."""
        return self._events.tells_subjects

    def begin(self) -> tuple[int, float]:
        """The number of another span, and when it begins."""
        self._count += 1
        return self._count, self._events.now()

    def end(
        self,
        name: str,
        span: int,
        parent: int,
        began: float,
        called: tuple[Any, Any],
        error: BaseException | None,
    ) -> None:
        """It has ended.

        Args:
            called: Its arguments and its value, as they were then.
            error: What it raised.
        """
        fault = "" if error is None else format_error(error)
        at, who = self._events.now(), self._trajectory
        facts = (who, at, name, span, parent, began, fault, called)
        self._events.tell_from_thread(_span_ended, facts)


def _span_ended(_: float, facts: Sequence[Any]) -> tuple[SpanEnded, tuple[Any, Any]]:
    trajectory, at, name, span, parent, began, error, called = facts
    event = SpanEnded(
        at=at,
        trajectory=trajectory,
        name=name,
        span=span,
        parent=parent,
        began=began,
        error=error,
    )
    return event, called


#: Those of the trajectory that the running code belongs to, and the innermost span around it: a
#: pair, or None. Threads of sync tools have it too.
_current: ContextVar[Any] = ContextVar("rollout_spans", default=None)


def enter_trajectory(events: EventStream, trajectory: int) -> None:
    """What the running task, and those that it starts, call from now on belongs to it."""
    _current.set((TrajectorySpans(events, trajectory), 0))


@overload
def trace(function: F, /) -> F: ...
@overload
def trace(*, name: str) -> Callable[[F], F]: ...
def trace(function: Any = None, /, *, name: str | None = None) -> Any:
    """Shows a function of yours as a span of the trajectory that calls it.

    For functions and coroutine functions, methods of all kinds too, that agents, tools and rewards
    call, however deep: arguments, value, seconds, and what it raised. Where nobody reads the run's
    events, and outside a trajectory, it adds a look at a variable.

    Args:
        name: Of the span; None: the function's.

    Raises:
        TypeError: It is no function, or makes a generator, whose time is that of who iterates.
    """
    if function is None:
        return functools.partial(_traced, name=name)
    return _traced(function, name=None)


def _traced(function: Any, *, name: str | None) -> Any:
    if isinstance(function, staticmethod | classmethod):
        return type(function)(_traced(function.__func__, name=name))
    if not callable(function):
        raise TypeError(f"rollout.trace: {function!r:.80}; expected a function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"rollout.trace: {function.__qualname__} makes a generator; trace its user")
    label = str(name or getattr(function, "__qualname__", type(function).__name__))
    signature = _signature_of(function)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            current = _current.get()
            if current is None:
                return await function(*args, **kwargs)
            span = _Span(label, current, signature, args, kwargs)
            try:
                value = await function(*args, **kwargs)
            except BaseException as error:
                span.end(None, error)
                raise
            span.end(value, None)
            return value

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        current = _current.get()
        if current is None:
            return function(*args, **kwargs)
        span = _Span(label, current, signature, args, kwargs)
        try:
            value = function(*args, **kwargs)
        except BaseException as error:
            span.end(None, error)
            raise
        span.end(value, None)
        return value

    return called


class _Span:
    """One call of a traced function; those that it calls are within it."""

    __slots__ = ("_began", "_inputs", "_name", "_number", "_parent", "_spans", "_token")

    def __init__(
        self,
        name: str,
        current: tuple[TrajectorySpans, int],
        signature: inspect.Signature | None,
        args: Any,
        kwargs: Any,
    ) -> None:
        self._name = name
        self._spans, self._parent = current
        # Before the call, and copied: the function, and who called it, may change them later.
        shown = self._spans.are_shown
        self._inputs = plain(_inputs(signature, args, kwargs)) if shown else None
        self._number, self._began = self._spans.begin()
        self._token: Token[Any] = _current.set((self._spans, self._number))

    def end(self, value: Any, error: BaseException | None) -> None:
        _current.reset(self._token)
        output = plain(value) if error is None and self._spans.are_shown else None
        called = self._inputs, output
        self._spans.end(self._name, self._number, self._parent, self._began, called, error)


def _signature_of(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some of C's
        return None


def _inputs(signature: inspect.Signature | None, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments by their names."""
    if signature is None:
        return {"args": args, **kwargs}
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return {"args": args, **kwargs}
