"""Agents that run the rows of verl's batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.agents.agent_loop import AgentLoop, register_agent
from rollout.agents.tool_agent import ToolAgent
from rollout.agents.turn import answer
from rollout.integrations.verl.rows import LOOP_AGENT, OWN_AGENTS, ROWS, row_of

if TYPE_CHECKING:
    from rollout.agents.context import AgentContext
    from rollout.agents.turn import AssistantTurn
    from rollout.tools import ToolResult


@register_agent(OWN_AGENTS["single_turn_agent"])
class VerlSingleTurn(AgentLoop):
    """Generates once, as verl's ``SingleTurnAgentLoop`` does."""

    async def run(self, context: AgentContext) -> None:
        """Generate once."""
        with context.prompt.extra[ROWS].adapter.running(context):
            await context.generate()


@register_agent(OWN_AGENTS["tool_agent"])
class VerlToolAgent(ToolAgent):
    """`ToolAgent`, which collects the rewards of calls as verl's ``ToolAgentLoop`` does."""

    async def run(self, context: AgentContext) -> None:
        """Run the machine until it terminates."""
        with context.prompt.extra[ROWS].adapter.running(context):
            await super().run(context)

    async def call_tools(self, context: AgentContext, turn: AssistantTurn) -> list[ToolResult]:
        """Run a turn's calls and append their answers."""
        conversation, row = context, row_of(context)
        results = await conversation.run_tools(turn.calls)
        ran = results[: context.config.max_parallel_calls]
        row.tool_rewards += [each.reward or 0.0 for each in ran]
        await conversation.answer([answer(c, r) for c, r in zip(turn.calls, results, strict=True)])
        return results


@register_agent(LOOP_AGENT)
class VerlAgentLoop(AgentLoop):
    """Runs a subclass of verl's ``AgentLoopBase`` as it is, its asyncio on an asyncio loop."""

    async def run(self, context: AgentContext) -> None:
        """Run the loop, and keep what it returned for its row."""
        adapter = context.prompt.extra[ROWS].adapter
        with adapter.running(context) as row:
            await adapter.run_loop(context, row)
