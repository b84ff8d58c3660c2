"""pydantic-ai, over each API."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any, Literal

import pytest
import script
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from through_gateway import run

from rollout.agents import AgentTask

pytestmark = pytest.mark.anyio

Api = Literal["chat", "responses", "messages"]


def model_of(task: AgentTask, api: Api) -> Any:
    if api == "messages":
        return AnthropicModel(
            task.model, provider=AnthropicProvider(base_url=task.root_url, api_key=task.api_key)
        )
    provider = OpenAIProvider(base_url=task.base_url, api_key=task.api_key)
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind(task.model, provider=provider)


async def read_all(context: Any, events: AsyncIterable[Any]) -> None:
    async for _event in events:
        pass


async def converse(task: AgentTask, api: Api, streamed: bool) -> list[str]:
    """Two questions with one history; returns the answers."""
    tools, answers, history = script.Tools(), [], None
    agent: Any = Agent(
        model_of(task, api), instructions=script.SYSTEM, tools=[tools.look_up, tools.add]
    )
    for question in (script.QUESTION, script.FOLLOWING):
        # With a handler its requests are streamed; `run_stream` would end at the first text.
        handler = read_all if streamed else None
        done = await agent.run(question, message_history=history, event_stream_handler=handler)
        answers.append(done.output)
        history = done.all_messages()
    tools.assert_called()
    return answers


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_pydantic_ai_conversation_is_one_exact_row(api: Api, streamed: bool) -> None:
    async def program(task: AgentTask) -> list[str]:
        return await converse(task, api, streamed)

    done = await run(program, script.scenario(), agent="async_client")
    done.assert_exact("main")
    assert done.result == [script.ANSWER, script.LAST]
