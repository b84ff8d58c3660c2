"""How a trajectory may end early."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from rollout.errors import ToolError
from rollout.limits import Clock, Deadline
from rollout.tools.calls import attempt
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger("rollout.agents")


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


async def finish(
    what: str, function: Callable[[], Awaitable[Any]], cleanup_s: float, whose: str
) -> None:
    """Let foreign code clean up; shielded, bounded, never raises."""
    try:
        with anyio.CancelScope(shield=True):
            limit = Clock(Deadline.after(cleanup_s, "limits.cleanup_s"))
            await attempt(function, limit=limit, what=what)
    except ToolError as error:
        logger.warning("%s: %s failed: %s", whose, what, error)
