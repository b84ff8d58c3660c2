"""Graphs of LangGraph as agents."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rollout.agents.agent_loop import AgentLoop
from rollout.agents.function_agent import openai_messages
from rollout.errors import AgentError
from rollout.gateway.session import open_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rollout.agents.context import AgentContext
    from rollout.integrations.langgraph.chat_model import RolloutChatModel


@asynccontextmanager
async def open_chat_model(context: AgentContext) -> AsyncIterator[RolloutChatModel]:
    """A chat model whose calls are turns of this trajectory, while the block runs.

    Under trio it may be called from the runtime's asyncio thread, where LangGraph has to run. The
    `gateway` section says how its calls are matched and bounded.

    Raises:
        AgentError: langchain-core is not installed.
        LimitExceeded: The block raised what a refusal for a length made of its graph.
    """
    try:
        from rollout.integrations.langgraph.chat_model import RolloutChatModel
    except ImportError as error:
        raise AgentError(
            f"LangGraph needs a package ({error}): pip install 'rollout-rl[langgraph]'"
        ) from error
    config = context.services.config.gateway
    async with open_session(context, config) as session:
        yield RolloutChatModel.over(session, config.unenforced)


class GraphAgent(AgentLoop):
    """Runs a graph of LangGraph for each trajectory, on asyncio: under trio in its thread.

    Register an instance: ``register_agent("react")(GraphAgent(lambda model: create_react_agent(
    model, tools)))``. The graph is given ``{"messages": …}`` of the prompt. Its last state is not
    kept but for what `result` makes of it.

    Args:
        build: Makes a compiled graph of the trajectory's chat model.
        config: LangGraph's configuration of a run, such as ``{"recursion_limit": 50}``.
        result: ``(state) -> mapping``, which joins the trajectory's `extra`.

    Raises:
        AgentError: An argument is wrong.
    """

    is_shared = True

    def __init__(
        self,
        build: Callable[[RolloutChatModel], Any],
        *,
        config: Mapping[str, Any] | None = None,
        result: Callable[[Any], Mapping[str, Any]] | None = None,
    ) -> None:
        if not callable(build):
            raise AgentError(f"GraphAgent: build = {build!r:.80}; expected a function of the model")
        self._build = build
        self._config = dict(config or {})
        self._result = result

    async def run(self, context: AgentContext) -> None:
        """Run one graph to its end."""
        messages = await openai_messages(context)
        async with open_chat_model(context) as model:

            async def play() -> Any:
                graph = self._build(model)
                if inspect.isawaitable(graph):
                    graph = await graph
                return await graph.ainvoke({"messages": messages}, self._config)

            state = await context.services.threads.run_asyncio("graph", play)
        if self._result is not None:
            result = self._result(state)
            if not isinstance(result, Mapping):
                raise AgentError(f"GraphAgent: result returned {result!r:.80}; expected a mapping")
            context.extra.update(result)
