"""How a trajectory may end early."""

from __future__ import annotations

import attrs

from rollout.types import Outcome


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
