"""Agents that ask once, or let the model alternate with tools and a simulated user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.agents.agent_loop import AgentLoop, register_agent
from rollout.types import Outcome

if TYPE_CHECKING:
    from rollout.agents.context import AgentContext
    from rollout.agents.turn import AssistantTurn
    from rollout.interactions import InteractionTurn
    from rollout.tools import ToolResult


@register_agent("single_turn")
class SingleTurnAgent(AgentLoop):
    """Generates once and ends; tool calls in the answer are not executed."""

    async def run(self, context: AgentContext) -> None:
        """Generate once."""
        await context.generate()


class ToolAgent(AgentLoop):
    """Lets the model generate, and then::

        calls its tools, and lets it generate again   where it called any
        asks the user, and lets it generate again     where it did not, and a user takes part
        ends                                          where none does

    It also ends where a generation was cut, a turn limit is reached, a tool or the user
    ends the trajectory, or a length or deadline leaves no room (which arrives as an exception).
    """

    is_shared = True

    async def run(self, context: AgentContext) -> None:
        """Run it until it ends."""
        await context.begin()
        is_over = False
        while not is_over:
            turn = await self.generate(context)
            if turn.cut_by is not None or not (turn.calls or context.has_interaction):
                return
            if has_reached_turn_limit(context):
                return
            if turn.calls:
                results = await self.call_tools(context, turn)
                is_over = any(result.end_trajectory for result in results)
            else:
                is_over = (await self.ask_user(context)).is_done

    async def generate(self, context: AgentContext) -> AssistantTurn:
        """The model's next turn."""
        return await context.generate()

    async def call_tools(self, context: AgentContext, turn: AssistantTurn) -> list[ToolResult]:
        """Run a turn's calls and append their answers."""
        return await context.call_tools(turn.calls)

    async def ask_user(self, context: AgentContext) -> InteractionTurn:
        """Let the simulated user answer."""
        return await context.ask_user()


# It keeps nothing of a trajectory: one serves all, and none is made for each that waits.
register_agent("tool_agent")(ToolAgent())


def has_reached_turn_limit(context: AgentContext) -> bool:
    """Settle the outcome where the turns are used up and the model wanted to continue."""
    config = context.config
    counts = (
        (context.state.generations, config.max_assistant_turns, "agent.max_assistant_turns"),
        (context.user_turns, config.max_user_turns, "agent.max_user_turns"),
    )
    for count, most, source in counts:
        if most is not None and count >= most:
            context.end(Outcome.LIMIT, "turns", limit_source=source)
            return True
    return False
