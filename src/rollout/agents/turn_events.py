"""What a conversation tells of its turns, while somebody reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.observe.events import TurnEnded, TurnStarted, UserEnded

if TYPE_CHECKING:
    from rollout.agents.identity import Identity
    from rollout.agents.turn_end import TurnEnd
    from rollout.engine.driver.generation import Generation
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
    began, now = times
    is_said = generation.finish_reason is not None or generation.ids
    events.emit(
        TurnEnded(
            at=events.since_start(now),
            trajectory=identity.number,
            turn=turn,
            began=events.since_start(began),
            path=identity.path,
            requests=tuple(part.request_id for part in generation.parts),
            prompt_tokens=prompt_tokens,
            cached_tokens=generation.cached_tokens,
            generated_tokens=len(generation.ids),
            held_s=generation.held_s,
            finish_reason=end.finish_reason if is_said else "",
            cut_by=end.cut_by or "",
        )
    )


def tell_user_ended(events: EventStream, identity: Identity, began: float, now: float) -> None:
    """A simulated user has answered."""
    events.emit(
        UserEnded(
            at=events.since_start(now),
            trajectory=identity.number,
            began=events.since_start(began),
        )
    )
