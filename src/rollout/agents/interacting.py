"""The simulated user of a trajectory: which one, how it begins, how it ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from rollout.agents.identity import RejectedPrompt
from rollout.chat.messages import text_of_content
from rollout.errors import ConfigError, LimitExceeded
from rollout.interactions import InteractionContext
from rollout.limits import Clock, Deadline
from rollout.tools.attempt import CallError, attempt
from rollout.types import Message, without_null_keys
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from rollout.agents.identity import Identity
    from rollout.agents.services import Services
    from rollout.config import AgentConfig
    from rollout.interactions import Interaction, InteractionTurn
    from rollout.types import Prompt

    class Context(Protocol):
        """What is needed of an `AgentContext`, which this module is imported by."""

        extra: Any
        turn_scores: Any

        @property
        def services(self) -> Services: ...
        @property
        def prompt(self) -> Prompt: ...
        @property
        def identity(self) -> Identity: ...


logger = logging.getLogger("rollout.agents")

#: What an answer of a user is called in messages.
USER = "respond of the interaction"


def interaction_name(prompt: Prompt, config: AgentConfig) -> str | None:
    """Of the user who takes part; None where nobody does."""
    return _kwargs(prompt).get("name") or config.interaction


def new_interaction(services: Services, name: str | None) -> Interaction | None:
    """The user of this name; None has none.

    Raises:
        RejectedPrompt: There is none of this name.
    """
    if name is None:
        return None
    try:
        return services.interactions.create(name)
    except ConfigError as error:
        raise RejectedPrompt("unknown_interaction", str(error)) from None


def interaction_context(context: Context) -> InteractionContext:
    """What a user is told of its trajectory."""
    return InteractionContext(
        uid=context.identity.uid,
        member=context.identity.member,
        kwargs=dict(_kwargs(context.prompt)),
        ground_truth=context.prompt.ground_truth,
        extra=context.extra,
        threads=context.services.threads,
    )


def heard(context: Context, name: str | None, turn: InteractionTurn) -> list[Message]:
    """Keep what a user's turn gives beside its words; the messages that say those."""
    if turn.score is not None:
        context.turn_scores.append(turn.score)
    context.extra.update(turn.extra)
    if turn.is_done:
        return []
    text = text_of_content(f"interaction {name!r}", turn.text)
    return [Message(role="user", content=encodable(text), extra=turn.extra)]


async def finish(interaction: Interaction, session: str, cleanup_s: float) -> None:
    """Let a user go; shielded, bounded, never raises."""
    limit = Clock(Deadline.after(cleanup_s, "limits.cleanup_s"))
    what = "finish of the interaction"
    try:
        with anyio.CancelScope(shield=True):
            await attempt(interaction.finish, limit=limit, what=what)
    except (CallError, LimitExceeded) as error:
        logger.warning("%s: finish of the interaction failed: %s", session, error)


def _kwargs(prompt: Prompt) -> Mapping[str, Any]:
    kwargs = prompt.extra.get("interaction_kwargs")
    # As keys of `tools_kwargs`: those that hold None may be of other users, or Arrow's.
    return without_null_keys(kwargs) if isinstance(kwargs, Mapping) else {}
