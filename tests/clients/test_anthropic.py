"""Anthropic's own client, as its users write agents with it."""

from __future__ import annotations

from functools import partial
from typing import Any

import anthropic
import pytest
import script
from through_gateway import run

from rollout.agents import AgentTask

pytestmark = pytest.mark.anyio

BOTH = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])

TOOLS: Any = [
    {"name": "look_up", "description": script.DESCRIPTION, "input_schema": script.LOOK_UP},
    {"name": "add", "input_schema": script.ADD},
]
CACHED: Any = {"type": "ephemeral"}


def converse(task: AgentTask, *, streamed: bool) -> list[str]:
    """Two questions, each request counted before it is made; returns the answers.

    What marks the cache moves with each request, as in most agents.
    """
    tools, answers = script.Tools(), []
    messages: list[Any] = []
    options: Any = {"model": task.model, "max_tokens": 4096, "tools": TOOLS}
    options["system"] = [{"type": "text", "text": script.SYSTEM, "cache_control": CACHED}]
    with anthropic.Anthropic(base_url=task.root_url, api_key=task.api_key) as client:
        for question in (script.QUESTION, script.FOLLOWING):
            messages.append({"role": "user", "content": question})
            while True:
                marked = [*messages[:-1], _marked(messages[-1])]
                asked = {name: options[name] for name in ("model", "tools", "system")}
                count = client.messages.count_tokens(messages=marked, **asked)
                if streamed:
                    with client.messages.stream(messages=marked, **options) as events:
                        message = events.get_final_message()
                else:
                    message = client.messages.create(messages=marked, **options)
                usage = message.usage
                cached = usage.cache_read_input_tokens or 0
                assert count.input_tokens == usage.input_tokens + cached
                messages.append({"role": "assistant", "content": message.content})
                results = [
                    {
                        "type": "tool_result",
                        "tool_use_id": block.id,
                        "content": tools.call(block.name, block.input),
                    }
                    for block in message.content
                    if block.type == "tool_use"
                ]
                if not results:
                    texts = (block.text for block in message.content if block.type == "text")
                    answers.append("".join(texts))
                    break
                messages.append({"role": "user", "content": results})
    tools.assert_called()
    return answers


def _marked(message: Any) -> Any:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": [{"type": "text", "text": content, "cache_control": CACHED}]}
    return message | {"content": [*content[:-1], content[-1] | {"cache_control": CACHED}]}


@BOTH
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_messages_conversation_is_one_exact_row(streamed: bool) -> None:
    done = await run(partial(converse, streamed=streamed), script.scenario())
    done.assert_exact("main")
    assert done.result == [script.ANSWER, script.LAST]
