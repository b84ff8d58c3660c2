"""OpenAI's own client, as its users write agents with it."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import openai
import pytest
import script
from through_gateway import run

from rollout.agents import AgentTask

pytestmark = pytest.mark.anyio

BOTH = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])

CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": "look_up", "parameters": script.LOOK_UP}},
    {"type": "function", "function": {"name": "add", "parameters": script.ADD}},
]
RESPONSES_TOOLS: Any = [
    {"type": "function", "name": "look_up", "parameters": script.LOOK_UP, "strict": False},
    {"type": "function", "name": "add", "parameters": script.ADD, "strict": False},
]


def chat(task: AgentTask, *, streamed: bool) -> list[str | None]:
    """Two questions through chat completions; returns the answers."""
    tools, answers = script.Tools(), []
    messages: list[Any] = [{"role": "system", "content": script.SYSTEM}]
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for question in (script.QUESTION, script.FOLLOWING):
            messages.append({"role": "user", "content": question})
            while True:
                options: Any = {"model": task.model, "messages": messages, "tools": CHAT_TOOLS}
                if streamed:
                    with client.chat.completions.stream(**options) as events:
                        message: Any = events.get_final_completion().choices[0].message
                else:
                    message = client.chat.completions.create(**options).choices[0].message
                messages.append(message)
                for call in message.tool_calls or ():
                    arguments = json.loads(call.function.arguments)
                    text = tools.call(call.function.name, arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
                if not message.tool_calls:
                    answers.append(message.content)
                    break
    tools.assert_called()
    return answers


@BOTH
@STREAMED
async def test_chat_conversation_is_one_exact_row(streamed: bool) -> None:
    done = await run(partial(chat, streamed=streamed), script.scenario())
    done.assert_exact("main")
    assert done.result == [script.ANSWER, script.LAST]


def responses(task: AgentTask, *, streamed: bool, is_stateful: bool) -> list[str]:
    """Two questions through responses; returns the answers."""
    tools, answers = script.Tools(), []
    items: list[Any] = []
    options: Any = {"model": task.model, "instructions": script.SYSTEM, "tools": RESPONSES_TOOLS}
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for question in (script.QUESTION, script.FOLLOWING):
            items.append({"role": "user", "content": question})
            while True:
                if streamed:
                    with client.responses.stream(input=items, **options) as events:
                        response: Any = events.get_final_response()
                else:
                    response = client.responses.create(input=items, **options)
                calls = [item for item in response.output if item.type == "function_call"]
                results = [
                    {
                        "type": "function_call_output",
                        "call_id": call.call_id,
                        "output": tools.call(call.name, json.loads(call.arguments)),
                    }
                    for call in calls
                ]
                if is_stateful:
                    options["previous_response_id"] = response.id
                    items = results
                else:
                    items += [*response.output, *results]
                if not calls:
                    answers.append(response.output_text)
                    break
    tools.assert_called()
    return answers


@BOTH
@STREAMED
@pytest.mark.parametrize("is_stateful", [False, True], ids=["repeated", "previous_response_id"])
async def test_responses_conversation_is_one_exact_row(streamed: bool, is_stateful: bool) -> None:
    program = partial(responses, streamed=streamed, is_stateful=is_stateful)
    done = await run(program, script.scenario())
    done.assert_exact("main")
    assert done.result == [script.ANSWER, script.LAST]


def sealed(task: AgentTask) -> list[str]:
    """Reasoning comes back as `encrypted_content` alone, as from clients that store nothing."""
    answers = []
    options: Any = {
        "model": task.model,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "tools": RESPONSES_TOOLS,
    }
    items: list[Any] = [{"role": "user", "content": script.QUESTION}]
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for _ in range(4):
            response = client.responses.create(input=items, **options)
            for item in response.output:
                given = item.model_dump(exclude_none=True, exclude={"id", "status"})
                if item.type == "reasoning":
                    given |= {"summary": [], "content": []}
                items.append(given)
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                item = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
                items.append(item)
            answers.append(response.output_text)
            if not calls:
                items.append({"role": "user", "content": script.FOLLOWING})
    return answers


async def test_responses_with_sealed_reasoning_are_one_exact_row() -> None:
    done = await run(sealed, script.scenario())
    done.assert_exact("main")
    assert done.result == ["I look.", "", script.ANSWER, script.LAST]


async def chat_async(task: AgentTask) -> str | None:
    """The first question, with the async client on whatever loop there is."""
    tools = script.Tools()
    messages: list[Any] = [{"role": "user", "content": script.QUESTION}]
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        while True:
            async with client.chat.completions.stream(
                model=task.model, messages=messages, tools=CHAT_TOOLS
            ) as events:
                message: Any = (await events.get_final_completion()).choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                text = tools.call(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if not message.tool_calls:
                tools.assert_called()
                return message.content


@BOTH
@pytest.mark.parametrize("agent", ["async_client", "native_client"])
async def test_async_client_conversation_is_one_exact_row(agent: str) -> None:
    done = await run(chat_async, script.scenario(), agent=agent)
    done.assert_exact("main")
    assert done.result == script.ANSWER
