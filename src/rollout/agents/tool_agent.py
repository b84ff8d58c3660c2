"""The model alternates with tools and, where one is configured, with a simulated user."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from rollout.agents.agent_loop import AgentLoop, register_agent
from rollout.types import Outcome

if TYPE_CHECKING:
    from rollout.agents.context import AgentContext
    from rollout.agents.turn import AssistantTurn
    from rollout.interactions import InteractionTurn
    from rollout.tools import ToolResult


class State(enum.Enum):
    """Where a tool agent stands."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@register_agent("tool_agent")
class ToolAgent(AgentLoop):
    """A state machine::

        PENDING -> GENERATING -> PROCESSING_TOOLS -> GENERATING   the model called tools
                              -> INTERACTING      -> GENERATING   it did not, and a user answers
                              -> TERMINATED                       it did not, and no user answers

    It also terminates where a generation was cut, a turn limit is reached, a tool or the user
    ends the trajectory, or a length or deadline leaves no room (which arrives as an exception).
    """

    def __init__(self) -> None:
        self.state = State.PENDING
        self._turn: AssistantTurn | None = None

    async def run(self, context: AgentContext) -> None:
        """Run the machine until it terminates."""
        steps = {
            State.PENDING: self._pending,
            State.GENERATING: self._generating,
            State.PROCESSING_TOOLS: self._processing_tools,
            State.INTERACTING: self._interacting,
        }
        while self.state is not State.TERMINATED:
            self.state = await steps[self.state](context)

    async def _pending(self, context: AgentContext) -> State:
        await context.begin()
        return State.GENERATING

    async def _generating(self, context: AgentContext) -> State:
        self._turn = await self.generate(context)
        if self._turn.cut_by is not None:
            return State.TERMINATED
        if not self._turn.calls and not context.has_interaction:
            return State.TERMINATED
        if has_reached_turn_limit(context):
            return State.TERMINATED
        return State.PROCESSING_TOOLS if self._turn.calls else State.INTERACTING

    async def generate(self, context: AgentContext) -> AssistantTurn:
        """The model's next turn."""
        return await context.generate()

    async def _processing_tools(self, context: AgentContext) -> State:
        turn, self._turn = self._turn, None  # while it generates, nobody needs its last turn
        assert turn is not None
        results = await self.call_tools(context, turn)
        is_over = any(result.end_trajectory for result in results)
        return State.TERMINATED if is_over else State.GENERATING

    async def call_tools(self, context: AgentContext, turn: AssistantTurn) -> list[ToolResult]:
        """Run a turn's calls and append their answers."""
        return await context.call_tools(turn.calls)

    async def ask_user(self, context: AgentContext) -> InteractionTurn:
        """Let the simulated user answer."""
        return await context.ask_user()

    async def _interacting(self, context: AgentContext) -> State:
        turn = await self.ask_user(context)
        return State.TERMINATED if turn.is_done else State.GENERATING


def has_reached_turn_limit(context: AgentContext) -> bool:
    """Settle the outcome where the turns are used up and the model wanted to continue."""
    config = context.config
    counts = (
        (context.assistant_turns, config.max_assistant_turns, "agent.max_assistant_turns"),
        (context.user_turns, config.max_user_turns, "agent.max_user_turns"),
    )
    for count, most, source in counts:
        if most is not None and count >= most:
            context.end(Outcome.LIMIT, "turns", limit_source=source)
            return True
    return False
