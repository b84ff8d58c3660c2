"""What a pool tells of its requests and its maintenance, while somebody reads."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rollout.observe.events import MemoryChanged, RequestEnded, RequestPlaced, WeightsUpdated
from rollout.types import format_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from rollout.engine.driver.pending_request import PendingRequest
    from rollout.engine.driver.recovery import Attempt
    from rollout.observe.event_stream import EventStream
    from rollout.observe.events import Event


def tell_request_placed(events: EventStream, attempt: Attempt, pending: PendingRequest) -> None:
    """A request was sent to a replica."""
    events.emit(
        RequestPlaced(
            at=events.since_start(attempt.asked_at),
            trajectory=attempt.trajectory,
            session=attempt.session_id,
            request=pending.request_id,
            replica=pending.part.replica,
            queue_s=attempt.asked_at - attempt.waits_since,
        )
    )


def tell_request_ended(
    events: EventStream, attempt: Attempt, pending: PendingRequest | None, now: float
) -> None:
    """It is over, or nobody waits for it any more; one that was not sent is none."""
    if pending is None:
        return
    assert pending.dispatch is not None
    facts = (
        attempt.trajectory,
        attempt.session_id,
        pending.part,
        attempt.waits_since,
        attempt.asked_at,
        pending.first_at,
        now,
        pending.dispatch.prompt_tokens,
        attempt.generation.cached_tokens if pending.finish_reason else 0,
        pending.finish_reason or _end_without_answer(pending),
    )
    events.tell(_request_ended, facts)


def _request_ended(start: float, facts: Sequence[Any]) -> tuple[RequestEnded, None]:
    trajectory, session, part, asked, placed, first, now = facts[:7]
    prompt_tokens, cached_tokens, finish_reason = facts[7:]
    first = now if first is None else first
    event = RequestEnded(
        at=now - start,
        trajectory=trajectory,
        session=session,
        request=part.request_id,
        replica=part.replica,
        began=asked - start,
        queue_s=placed - asked,
        prefill_s=first - placed,
        decode_s=now - first,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        tokens=part.count,
        finish_reason=finish_reason,
    )
    return event, None


def _end_without_answer(pending: PendingRequest) -> str:
    if pending.is_lost:
        return "lost"
    return "error" if pending.is_garbled else "cancelled"


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
        error = format_error(fault)
        raise
    finally:
        if events.is_on:
            events.emit(event(at=events.now(), began=began, error=error))
