"""Agents that ask once, or let the model alternate with tools and a simulated user.

One of them goes beyond its context: full, it writes a summary and begins again with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout.agents.agent_loop import AgentLoop, register_agent
from rollout.agents.turn import answer
from rollout.errors import LimitExceeded
from rollout.types import InvalidToolCall, Message, Outcome

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from rollout.agents.context import AgentContext
    from rollout.agents.turn import AssistantTurn
    from rollout.interactions import InteractionTurn
    from rollout.tools import ToolResult
    from rollout.types import ToolCall

#: Paths of the lengths that end a row, and not a turn.
_LENGTHS = ("lengths.response", "engine.context_length")
_SUMMARY = "Your notes on the work so far, of which nothing else is kept:\n\n{notes}"
_RESULTS = "\n\nYour last calls were answered after you had written them:\n\n{results}"
_REPLY = "\n\nYour last words were answered after you had written them:\n\n{reply}"
_CONTINUE = "\n\nContinue the work."


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
            is_last = turn.cut_by is not None or not (turn.calls or context.has_interaction)
            if is_last or has_reached_turn_limit(context):
                return
            if turn.calls:
                results = await self.call_tools(context, turn)
                is_over = any(result.end_trajectory for result in results)
            else:
                is_over = (await self.ask_user(context)).is_done

    def generate(self, context: AgentContext) -> Coroutine[Any, Any, AssistantTurn]:
        """The model's next turn."""
        return context.generate()

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


@register_agent("compacting_agent")
class CompactingAgent(ToolAgent):
    """As `ToolAgent`, but for what happens where the row has no room left.

    `agent.compaction_room` tokens of it are kept free. Where nothing else is left, the model is
    asked with `agent.compaction_prompt` for a summary, which takes that room and is trained as its
    other turns are. The next row, of purpose "compaction", begins with the prompt and the summary.
    So it does where a turn was cut by the length, and where what tools or a user say does not fit;
    that is said after the summary. After `agent.max_compactions` the trajectory ends as `length`.
    """

    is_shared = False

    def __init__(self) -> None:
        self._compactions = 0
        #: What the conversation began with: a sub-agent's is not the trajectory's prompt.
        self._opening: Sequence[Message] = ()

    async def generate(self, context: AgentContext) -> AssistantTurn:
        """The model's next turn; in a new row where the last one has no room for it."""
        self._opening = self._opening or list(context.messages)
        self._keep_room(context)
        try:
            turn = await context.generate()
        except LimitExceeded as error:
            self._check(context, error)
        else:
            if turn.cut_by not in _LENGTHS or not self._may_compact(context):
                return turn
        await self._compact(context)
        return await self.generate(context)

    async def call_tools(self, context: AgentContext, turn: AssistantTurn) -> list[ToolResult]:
        """Run a turn's calls; their answers stand in a new row where the last one has no room."""
        results = await context.run_tools(turn.calls)
        pairs = list(zip(turn.calls, results, strict=True))
        words = "\n".join(f"{_call(call)}: {result.text}" for call, result in pairs)
        await self._say(context, [answer(*pair) for pair in pairs], _RESULTS.format(results=words))
        return results

    async def ask_user(self, context: AgentContext) -> InteractionTurn:
        """Let the user answer, in a new row where the last one has no room for that."""
        turn, words = await context.hear_user()
        if words:
            await self._say(context, words, _REPLY.format(reply=words[0].content))
        return turn

    async def _say(self, context: AgentContext, messages: list[Message], in_words: str) -> None:
        """Answer the model's turn, or say so after a summary."""
        try:
            await context.answer(messages)
        except LimitExceeded as error:
            self._check(context, error)
            await self._compact(context, in_words)

    def _may_compact(self, context: AgentContext) -> bool:
        return self._compactions < context.config.max_compactions

    def _keep_room(self, context: AgentContext) -> None:
        context.keep_room(context.config.compaction_room if self._may_compact(context) else 0)

    def _check(self, context: AgentContext, error: LimitExceeded) -> None:
        """Return where a summary helps."""
        if error.source not in _LENGTHS or not self._may_compact(context):
            raise error

    async def _compact(self, context: AgentContext, further: str = "") -> None:
        """Have the model sum up what was said, and begin the next row with that.

        Raises:
            LimitExceeded: There is no room for that either.
        """
        config = context.config
        context.keep_room(0)
        self._compactions += 1
        context.observe([Message(role="user", content=config.compaction_prompt)])
        notes = await context.generate()
        words = _SUMMARY.format(notes=notes.content.strip()) + further + _CONTINUE
        message = Message(role="user", content=words)
        await context.compact([*self._opening, message])
        self._keep_room(context)


def _call(call: ToolCall | InvalidToolCall) -> str:
    if isinstance(call, InvalidToolCall):
        return call.raw
    return f"{call.name}({msgspec.json.encode(dict(call.arguments)).decode()})"
