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
    if not events.tells_all:
        return
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
    parts, count = generation.parts, generation.count
    is_said = count > 0 or generation.finish_reason is not None
    events.emit(
        TurnEnded(
            at=events.since_start(now),
            trajectory=identity.number,
            turn=turn,
            began=events.since_start(began),
            path=identity.path,
            requests=(parts[0].request_id,)
            if len(parts) == 1
            else tuple([part.request_id for part in parts]),
            prompt_tokens=prompt_tokens,
            cached_tokens=generation.cached_tokens,
            generated_tokens=count,
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
