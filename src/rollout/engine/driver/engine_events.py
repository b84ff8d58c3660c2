"""What a pool tells of its requests and its maintenance, while somebody reads."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rollout.observe.events import MemoryChanged, RequestEnded, RequestPlaced, WeightsUpdated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from rollout.engine.driver.generation import Generation
    from rollout.engine.driver.pending_request import PendingRequest
    from rollout.engine.driver.recovery import Attempt
    from rollout.observe.event_stream import EventStream
    from rollout.observe.events import Event


class RequestEvents:
    """Tells of one request, from when a place is asked for until it is over.

    It is a reader of the generation's tokens until the first ones have come.
    """

    __slots__ = (
        "_asked",
        "_attempt",
        "_clock",
        "_events",
        "_first",
        "_pending",
        "_placed",
        "_prompt",
    )

    def __init__(self, events: EventStream, attempt: Attempt, clock: Callable[[], float]) -> None:
        self._events, self._attempt, self._clock = events, attempt, clock
        self._asked = clock()
        self._placed: float | None = None
        self._first: float | None = None
        self._prompt = 0

    def placed(self, pending: PendingRequest) -> None:
        """It was sent to a replica."""
        events, attempt = self._events, self._attempt
        self._pending, self._placed = pending, self._clock()
        self._prompt = attempt.prompt_tokens
        attempt.generation.on_tokens += (self,)
        if not events.tells_all:
            return
        events.emit(
            RequestPlaced(
                at=events.since_start(self._placed),
                trajectory=attempt.trajectory,
                session=attempt.session_id,
                request=pending.request_id,
                replica=pending.part.replica,
                queue_s=self._placed - self._asked,
            )
        )

    def __call__(self, generation: Generation) -> None:
        """Its first tokens have come, or its end."""
        if self._pending.part.count:
            self._first = self._clock()
        generation.leave_out(self)

    def ended(self) -> None:
        """It is over, or nobody waits for it any more; one that was not sent is none."""
        if self._placed is None:
            return
        events, attempt, pending, now = self._events, self._attempt, self._pending, self._clock()
        attempt.generation.leave_out(self)
        first = now if self._first is None else self._first
        events.emit(
            RequestEnded(
                at=events.since_start(now),
                trajectory=attempt.trajectory,
                session=attempt.session_id,
                request=pending.request_id,
                replica=pending.part.replica,
                began=events.since_start(self._asked),
                queue_s=self._placed - self._asked,
                prefill_s=first - self._placed,
                decode_s=now - first,
                prompt_tokens=self._prompt,
                cached_tokens=attempt.generation.cached_tokens if pending.finish_reason else 0,
                tokens=pending.part.count,
                finish_reason=_end_of(pending),
            )
        )


def _end_of(pending: PendingRequest) -> str:
    if pending.is_lost:
        return "lost"
    return pending.finish_reason or ("error" if pending.is_garbled else "cancelled")


def telling_weights(events: EventStream, version: int, mode: str) -> AbstractContextManager[None]:
    """Tell of an update of the weights, and of what became of it."""
    return _telling(events, partial(WeightsUpdated, version=version, mode=mode))


def telling_memory(
    events: EventStream, action: str, tags: tuple[str, ...]
) -> AbstractContextManager[None]:
    """Tell of memory that is released or taken back."""
    return _telling(events, partial(MemoryChanged, action=action, tags=tags))


@contextmanager
def _telling(events: EventStream, event: Callable[..., Event]) -> Iterator[None]:
    """Tell of the block once it is left, with the error that left it."""
    began, error = events.now(), ""
    try:
        yield
    except BaseException as fault:
        error = f"{type(fault).__name__}: {fault}"
        raise
    finally:
        if events.is_on:
            events.emit(event(at=events.now(), began=began, error=error))
