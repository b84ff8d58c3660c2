"""One question, one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.agents.agent_loop import AgentLoop, register_agent

if TYPE_CHECKING:
    from rollout.agents.context import AgentContext


@register_agent("single_turn")
class SingleTurnAgent(AgentLoop):
    """Generates once and ends; tool calls in the answer are not executed."""

    __slots__ = ()

    async def run(self, context: AgentContext) -> None:
        """Generate once."""
        await context.generate()
