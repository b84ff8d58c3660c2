"""Which trajectory this is, and how it may end early."""

from __future__ import annotations

import attrs

from rollout.seeds import derive_seed
from rollout.types import Outcome


@attrs.frozen(kw_only=True)
class Identity:
    """Which trajectory this is.

    Attributes:
        uid: The prompt's uid.
        group: Position of the prompt in the call.
        member: Position within the group.
        step: The trainer's step.
        run_seed: What all seeds of the run derive from.
        validate: Whether this is a validation rollout.
    """

    uid: str
    group: int
    member: int
    step: int
    run_seed: int
    validate: bool

    @property
    def session_id(self) -> str:
        """Names the trajectory to the router and the engines."""
        return f"{self.step}/{self.uid}/{self.member}"

    def seed_of_turn(self, turn: int) -> int:
        """The seed of the trajectory's generation number `turn`, the same in every run."""
        return derive_seed(self.run_seed, self.step, self.uid, self.member, turn)


@attrs.frozen(kw_only=True)
class Ending:
    """An outcome that is settled before the agent returns."""

    outcome: Outcome
    reason: str
    limit_source: str | None = None


class RejectedPrompt(Exception):
    """The prompt cannot be run: the trajectory's outcome is `rejected`, for this reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
