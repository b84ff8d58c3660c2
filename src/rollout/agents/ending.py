"""How a trajectory may end early."""

from __future__ import annotations

import attrs

from rollout.types import Cause, Outcome


@attrs.frozen(kw_only=True)
class Ending:
    """How a trajectory ends, and the root cause of a failure."""

    outcome: Outcome
    reason: str
    limit_source: str | None = None
    cause: Cause | None = None

    @classmethod
    def fail(cls, reason: str, error: BaseException) -> Ending:
        """Return a failure by what was raised."""
        return cls(outcome=Outcome.FAILED, reason=reason, cause=Cause.of(error))


class RejectedPrompt(Exception):
    """The prompt cannot be run: the trajectory's outcome is `rejected`, for this reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
