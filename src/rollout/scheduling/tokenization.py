"""Compares finished trajectories with a full rendering of their conversations."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from rollout.agents.ending import Ending
from rollout.errors import TemplateError
from rollout.types import Outcome, format_error

if TYPE_CHECKING:
    from collections.abc import Collection

    from rollout.agents.context import AgentContext

logger = logging.getLogger("rollout.scheduling")

#: How a trajectory must have ended to be compared: others lack what their agent would have added.
COMPARED = (Outcome.COMPLETED, Outcome.LENGTH, Outcome.LIMIT)
#: In the place of a kind of drift, where the template refuses the conversation.
REFUSED = "refused"
#: What "sample" compares: of each kind of conversation those that end first, and then one in so
#: many of all. A template drifts from the start or not at all, but perhaps only where tools answer
#: or another turn follows, and conversations without end first; to render one again costs as much
#: as some of its turns.
FIRST, THEN_ONE_IN = 8, 512


class TokenizationCheck:
    """The `agent.tokenization_check` of a runtime; it logs each kind of drift once.

    Args:
        mode: "off", "sample", "warn" or "strict".
        ignored: Kinds of drift that count as identical.
    """

    def __init__(self, mode: str, ignored: Collection[str] = ()) -> None:
        self._mode = mode
        self._ignored = frozenset(ignored)
        self._logged: set[str] = set()
        self._seen = 0
        self._of_kind: Counter[tuple[bool, bool]] = Counter()

    async def check(self, context: AgentContext, ending: Ending) -> tuple[str | None, Ending]:
        """The kind of drift of a trajectory that ended so, and how it ends with that.

        The kind is None where nothing was compared.
        """
        if ending.outcome not in COMPARED or not self._is_chosen(context):
            return None, ending
        kind, message = await self._compare(context)
        if kind is None or kind == "identical":
            return kind, ending
        if self._mode == "strict":
            return kind, Ending.fail("tokenization", TemplateError(message))
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "%s: %s (further ones of this kind are counted, not logged)",
                context.identity.session_id,
                message,
            )
        return kind, ending

    def _is_chosen(self, context: AgentContext) -> bool:
        if self._mode != "sample":
            return self._mode != "off"
        tools = context.state.used_tools
        kind = context.assistant_turns > 1, tools is not None and tools.calls > 0
        self._seen += 1
        self._of_kind[kind] += 1
        return self._of_kind[kind] <= FIRST or self._seen % THEN_ONE_IN == 0

    async def _compare(self, context: AgentContext) -> tuple[str | None, str]:
        try:
            drift = await context.check_tokens()
        except Exception as error:  # a template is foreign code
            why = error if isinstance(error, TemplateError) else format_error(error)
            return REFUSED, f"the conversation cannot be rendered as a whole: {why}"
        if drift is None:
            return None, ""
        return ("identical" if drift.kind in self._ignored else drift.kind), str(drift)
