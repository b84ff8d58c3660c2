"""What a conversation tells of its turns, while somebody reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.observe.events import TurnEnded, TurnStarted, UserEnded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.agents.identity import Identity
    from rollout.agents.turn_end import TurnEnd
    from rollout.engine.pool.generation import Generation
    from rollout.observe.event_stream import EventStream


def tell_turn_started(events: EventStream, identity: Identity, turn: int, now: float) -> None:
    """The model is asked for a turn."""
    events.emit(
        TurnStarted(
            at=events.since_start(now), trajectory=identity.number, turn=turn, path=identity.path
        )
    )


def tell_turn_ended(
    events: EventStream,
    identity: Identity,
    turn: int,
    times: tuple[float, float],
    prompt_tokens: int,
    generation: Generation,
    end: TurnEnd,
) -> None:
    """It has its turn, or what there is of it.

    Args:
        times: When it was asked for, and now.
        prompt_tokens: Before it.
    """
    (began, now), count = times, generation.count
    is_said = count > 0 or generation.finish_reason is not None
    facts = (
        identity.number,
        turn,
        began,
        now,
        identity.path,
        generation.parts,
        prompt_tokens,
        generation.cached_tokens,
        count,
        generation.held_s,
        end.finish_reason if is_said else "",
        end.cut_by or "",
    )
    events.tell(_turn_ended, facts)


def _turn_ended(start: float, facts: Sequence[Any]) -> tuple[TurnEnded, None]:
    trajectory, turn, began, now, path, parts, prompt_tokens, cached_tokens = facts[:8]
    generated_tokens, held_s, finish_reason, cut_by = facts[8:]
    event = TurnEnded(
        at=now - start,
        trajectory=trajectory,
        turn=turn,
        began=began - start,
        path=path,
        requests=tuple([part.request_id for part in parts]),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        generated_tokens=generated_tokens,
        held_s=held_s,
        finish_reason=finish_reason,
        cut_by=cut_by,
    )
    return event, None


def tell_user_ended(events: EventStream, identity: Identity, began: float, now: float) -> None:
    """A simulated user has answered."""
    events.tell(_user_ended, (identity.number, began, now))


def _user_ended(start: float, facts: Sequence[Any]) -> tuple[UserEnded, None]:
    trajectory, began, now = facts
    return UserEnded(at=now - start, trajectory=trajectory, began=began - start), None
