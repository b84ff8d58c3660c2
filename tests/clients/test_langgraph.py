"""LangGraph's prebuilt agent, with the chat models of LangChain."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Literal

import pytest
import script
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent
from through_gateway import run

from rollout.agents import AgentTask

pytestmark = pytest.mark.anyio

Api = Literal["chat", "responses", "messages"]
APIS = pytest.mark.parametrize("api", ["chat", "responses", "messages"])


def agent_of(task: AgentTask, api: Api, tools: script.Tools) -> Any:
    if api == "messages":
        model: Any = ChatAnthropic(
            model=task.model, base_url=task.root_url, api_key=task.api_key, max_tokens=4096
        )
    else:
        model = ChatOpenAI(
            model=task.model,
            base_url=task.base_url,
            api_key=task.api_key,
            use_responses_api=api == "responses",
            output_version="responses/v1" if api == "responses" else None,
        )
    functions = [StructuredTool.from_function(each) for each in (tools.look_up, tools.add)]
    with warnings.catch_warnings(action="ignore"):  # another package's name is preferred
        return create_react_agent(
            model, functions, prompt=script.SYSTEM, checkpointer=InMemorySaver()
        )


def asked(question: str) -> Any:
    return {"messages": [{"role": "user", "content": question}]}


def converse(task: AgentTask, *, api: Api, streamed: bool) -> list[str]:
    """Two questions in one thread of the graph; returns the answers."""
    tools, answers = script.Tools(), []
    graph = agent_of(task, api, tools)
    thread: Any = {"configurable": {"thread_id": "1"}}
    for question in (script.QUESTION, script.FOLLOWING):
        if streamed:
            for _chunk in graph.stream(asked(question), thread, stream_mode="messages"):
                pass
        else:
            graph.invoke(asked(question), thread)
        answers.append(graph.get_state(thread).values["messages"][-1].text)
    tools.assert_called()
    return answers


@APIS
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_prebuilt_agent_conversation_is_one_exact_row(api: Api, streamed: bool) -> None:
    done = await run(partial(converse, api=api, streamed=streamed), script.scenario())
    done.assert_exact("main")
    assert done.result == [script.ANSWER, script.LAST]


async def test_dropped_reasoning_forks_where_that_is_asked_for() -> None:
    """Its model for chat completions drops what the model thought, in the first turn here."""
    program = partial(converse, api="chat", streamed=False)
    done = await run(program, script.scenario(), dropped_reasoning="fork")
    done.assert_exact("main", "branch")
    assert [len(row.turns) for row in done.rows] == [1, 3]
    assert done.result == [script.ANSWER, script.LAST]
