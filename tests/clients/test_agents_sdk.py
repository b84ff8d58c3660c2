"""OpenAI's Agents SDK, over chat completions and over responses."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import script
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
)
from openai import AsyncOpenAI
from through_gateway import run

from rollout.agents import AgentTask

pytestmark = pytest.mark.anyio

Api = Literal["chat", "responses"]


def agent_of(task: AgentTask, api: Api, client: AsyncOpenAI, tools: script.Tools) -> Agent[Any]:
    kind: Any = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    return Agent(
        name="Clerk",
        instructions=script.SYSTEM,
        model=kind(model=task.model, openai_client=client),
        tools=[function_tool(each) for each in (tools.look_up, tools.add)],
    )


async def converse(task: AgentTask, api: Api, streamed: bool) -> list[str]:
    """Two questions in one session; returns the answers."""
    tools, answers = script.Tools(), []
    session = SQLiteSession("one")
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        clerk = agent_of(task, api, client, tools)
        for question in (script.QUESTION, script.FOLLOWING):
            if streamed:
                done: Any = Runner.run_streamed(clerk, question, session=session)
                async for _event in done.stream_events():
                    pass
            else:
                done = await Runner.run(clerk, question, session=session)
            answers.append(done.final_output)
    session.close()
    tools.assert_called()
    return answers


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_agents_sdk_conversation_is_one_exact_row(api: Api, streamed: bool) -> None:
    async def program(task: AgentTask) -> list[str]:
        return await converse(task, api, streamed)

    done = await run(program, script.scenario(), agent="async_client")
    done.assert_exact("main")
    assert done.result == [script.ANSWER, script.LAST]
