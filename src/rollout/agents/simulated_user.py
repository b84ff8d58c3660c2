"""The simulated user of a trajectory: which one, how it begins, how it ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from rollout.agents.identity import RejectedPrompt
from rollout.chat.messages import text_of_content
from rollout.errors import ConfigError, ToolError
from rollout.interactions import InteractionContext
from rollout.limits import Clock, Deadline
from rollout.observe.events import UserEnded
from rollout.tools.attempt import attempt
from rollout.types import Message, without_null_keys
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from rollout.agents.identity import Identity
    from rollout.agents.trajectory_state import TrajectoryState
    from rollout.interactions import Interaction, InteractionTurn
    from rollout.observe.event_stream import EventStream
    from rollout.types import Prompt

logger = logging.getLogger("rollout.agents")

#: What an answer of a user is called in messages.
USER = "respond of the interaction"


def find_user_name(state: TrajectoryState) -> str | None:
    """The name of the user who takes part; None where nobody does."""
    return _get_kwargs(state.original_prompt).get("name") or state.config.interaction


def make_user(state: TrajectoryState) -> Interaction | None:
    """The user who takes part; None where nobody does.

    Raises:
        RejectedPrompt: There is none of this name.
    """
    name = find_user_name(state)
    if name is None:
        return None
    try:
        return state.services.interactions.create(name)
    except ConfigError as error:
        raise RejectedPrompt("unknown_interaction", str(error)) from None


async def start_user(user: Interaction, state: TrajectoryState) -> None:
    """Start a user, with what it learns of its trajectory."""
    await user.start(
        InteractionContext(
            uid=state.identity.uid,
            member=state.identity.member,
            kwargs=dict(_get_kwargs(state.prompt)),
            ground_truth=state.prompt.ground_truth,
            extra=state.extra,
            threads=state.services.threads,
        )
    )


def read_user_turn(state: TrajectoryState, turn: InteractionTurn) -> list[Message]:
    """Add what a user's turn brings to the trajectory; return the messages with its words."""
    if turn.score is not None:
        state.turn_scores.append(turn.score)
    state.extra.update(turn.extra)
    if turn.is_done:
        return []
    text = text_of_content(f"interaction {find_user_name(state)!r}", turn.text)
    return [Message(role="user", content=encodable(text), extra=turn.extra)]


async def close_user(user: Interaction, identity: Identity, cleanup_s: float) -> None:
    """Finish a user; shielded, bounded, never raises."""
    limit = Clock(Deadline.after(cleanup_s, "limits.cleanup_s"))
    what = "finish of the interaction"
    try:
        with anyio.CancelScope(shield=True):
            await attempt(user.finish, limit=limit, what=what)
    except ToolError as error:
        logger.warning("%s: %s failed: %s", identity.session_id, what, error)


def emit_user_ended(events: EventStream, identity: Identity, began: float, now: float) -> None:
    """Emit that a simulated user has answered."""
    events.tell(_make_user_ended, (identity.number, began, now))


def _make_user_ended(start: float, facts: Sequence[Any]) -> tuple[UserEnded, None]:
    trajectory, began, now = facts
    return UserEnded(at=now - start, trajectory=trajectory, began=began - start), None


def _get_kwargs(prompt: Prompt) -> Mapping[str, Any]:
    kwargs = prompt.extra.get("interaction_kwargs")
    # As keys of `tools_kwargs`: those that hold None may be of other users, or Arrow's.
    return without_null_keys(kwargs) if isinstance(kwargs, Mapping) else {}
