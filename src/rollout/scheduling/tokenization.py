"""Compares finished trajectories with a full rendering of their conversations."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rollout.errors import TemplateError
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection

    from rollout.agents.context import AgentContext

logger = logging.getLogger("rollout.scheduling")

#: How a trajectory must have ended to be compared: others lack what their agent would have added.
COMPARED = (Outcome.COMPLETED, Outcome.LENGTH, Outcome.LIMIT)
#: In the place of a kind of drift, where the template refuses the conversation.
REFUSED = "refused"


class TokenizationCheck:
    """What `agent.tokenization_check` asks for; one for a runtime, so that it logs a kind once.

    Args:
        mode: "off", "warn" or "strict".
        ignored: Kinds of drift that count as identical.
    """

    def __init__(self, mode: str, ignored: Collection[str] = ()) -> None:
        self._mode = mode
        self._ignored = frozenset(ignored)
        self._logged: set[str] = set()

    async def check(self, context: AgentContext) -> tuple[str | None, str | None]:
        """The kind of drift, and why the trajectory must fail for it; None where there is none.

        The kind is None where nothing was compared.
        """
        if self._mode == "off":
            return None, None
        kind, message = await self._compare(context)
        if kind is None or kind == "identical":
            return kind, None
        if self._mode == "strict":
            return kind, message
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "%s: %s (further ones of this kind are counted, not logged)",
                context.identity.session_id,
                message,
            )
        return kind, None

    async def _compare(self, context: AgentContext) -> tuple[str | None, str]:
        try:
            drift = await context.check_tokens()
        except TemplateError as error:
            return REFUSED, f"the conversation cannot be rendered as a whole: {error}"
        if drift is None:
            return None, ""
        return ("identical" if drift.kind in self._ignored else drift.kind), str(drift)
