"""A simulated user who follows a script."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any

from rollout.errors import ConfigError
from rollout.interactions.interaction import Interaction, InteractionTurn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.types import Message


class ScriptedUser:
    """Makes users who say these lines in order, one after each answer, and then are done.

    The turn after the last line has no text and ends the conversation.

    Args:
        lines: What the user says.
        name: What prompts and ``agent.interaction`` call it.
        scores: For each line, the score of the turn that says it; None gives none.

    Raises:
        ConfigError: The numbers of lines and scores differ.
    """

    def __init__(
        self,
        lines: Sequence[str],
        *,
        name: str = "scripted",
        scores: Sequence[float | None] | None = None,
    ) -> None:
        scores = [None] * len(lines) if scores is None else scores
        if len(scores) != len(lines):
            counts = f"{len(lines)} lines and {len(scores)} scores"
            raise ConfigError(f"interaction {name!r}: {counts}; expected as many scores as lines")
        self.name, self.turns = name, [*map(InteractionTurn, lines, repeat(False), scores)]

    def __call__(self) -> Interaction:
        """A user at the beginning of the script."""
        return _Reader(self)


class _Reader(Interaction):
    def __init__(self, user: ScriptedUser) -> None:
        self.name, self._turns = user.name, iter(user.turns)

    async def respond(self, messages: Sequence[Message | Mapping[str, Any]]) -> InteractionTurn:
        return next(self._turns, InteractionTurn("", is_done=True))
