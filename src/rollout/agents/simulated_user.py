"""The simulated user of a trajectory: which one, how it begins, how it ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollout.agents.ending import RejectedPrompt
from rollout.chat.messages import text_of_content
from rollout.errors import ConfigError
from rollout.interactions import InteractionContext
from rollout.types import Message, without_null_keys
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from rollout.agents.trajectory_state import TrajectoryState
    from rollout.interactions import Interaction, InteractionTurn
    from rollout.types import Prompt

logger = logging.getLogger("rollout.agents")

#: What an answer of a user is called in messages.
USER = "respond of the interaction"


def find_user_name(state: TrajectoryState) -> str | None:
    """The name of the user who takes part; None where nobody does."""
    return _get_kwargs(state.prompt).get("name") or state.config.interaction


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


def _get_kwargs(prompt: Prompt) -> Mapping[str, Any]:
    kwargs = prompt.extra.get("interaction_kwargs")
    # As keys of `tools_kwargs`: those that hold None may be of other users, or Arrow's.
    return without_null_keys(kwargs) if isinstance(kwargs, Mapping) else {}
