"""litellm, under each of its providers that speak an API of the gateway."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

import litellm
import pytest
import script
from through_gateway import run

from rollout.agents import AgentTask

pytestmark = pytest.mark.anyio

Provider = Literal["openai", "anthropic", "hosted_vllm"]
TOOLS: Any = [
    {"type": "function", "function": {"name": "look_up", "parameters": script.LOOK_UP}},
    {"type": "function", "function": {"name": "add", "parameters": script.ADD}},
]


def converse(task: AgentTask, *, provider: Provider, streamed: bool) -> list[str | None]:
    """Two questions; returns the answers."""
    tools, answers = script.Tools(), []
    messages: list[Any] = [{"role": "system", "content": script.SYSTEM}]
    base: Any = task.root_url if provider == "anthropic" else task.base_url
    for question in (script.QUESTION, script.FOLLOWING):
        messages.append({"role": "user", "content": question})
        while True:
            done: Any = litellm.completion(
                model=f"{provider}/{task.model}",
                api_base=base,
                api_key=task.api_key,
                messages=messages,
                tools=TOOLS,
                stream=streamed,
            )
            if streamed:
                done = litellm.stream_chunk_builder(list(done), messages=messages)
            message = done.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                text = tools.call(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if not message.tool_calls:
                answers.append(message.content)
                break
    tools.assert_called()
    return answers


@pytest.mark.parametrize("provider", ["openai", "anthropic", "hosted_vllm"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_litellm_conversation_is_one_exact_row(provider: Provider, streamed: bool) -> None:
    program = partial(converse, provider=provider, streamed=streamed)
    done = await run(program, script.scenario())
    done.assert_exact("main")
    assert done.result == [script.ANSWER, script.LAST]
