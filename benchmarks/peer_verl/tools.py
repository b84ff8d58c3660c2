"""CPU of a call through verl's ToolAgentLoop, as `benchmarks/tools.py` measures ours.

Run by that in verl's environment; prints JSON: microseconds of a call beyond a bare await, with 1
and 1000 trajectories.
"""

from __future__ import annotations

import asyncio  # noqa: TID251  (verl runs on it)
import json
import statistics
import sys
import time  # noqa: TID251  (what is measured here is CPU time)
from types import SimpleNamespace
from typing import Any

from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema

PROPERTIES = {"number": {"type": "integer"}, "text": {"type": "string"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["number"]}
FUNCTION = {"name": "noop", "description": "Do nothing.", "parameters": PARAMETERS}


async def noop(number: int, text: str = "") -> str:
    return "done"


def make_loop() -> Any:
    """What `_call_tool` uses of a loop."""
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": FUNCTION})
    tool = FunctionTool(name="noop", fn=noop, tool_schema=schema, is_async=True)
    return SimpleNamespace(
        tools={"noop": tool}, max_tool_response_length=4096, tool_response_truncate_side="middle"
    )


async def call(loop: Any, calls: int) -> None:
    """Calls of one trajectory, each gathered as verl gathers those of a turn."""
    request = FunctionCall(name="noop", arguments='{"number": 1, "text": "x"}')
    for _ in range(calls):
        await asyncio.sleep(0)
        task = ToolAgentLoop._call_tool(loop, request, {}, SimpleNamespace())
        ((answer, _, _),) = await asyncio.gather(task)
        assert answer.text == "done"


async def call_bare(loop: Any, calls: int) -> None:
    """The same calls without verl."""
    for _ in range(calls):
        await asyncio.sleep(0)
        assert await noop(1, "x") == "done"


async def measure(run: Any, loop: Any, trajectories: int, calls: int) -> float:
    """CPU microseconds of a call."""
    started = time.process_time()
    await asyncio.gather(*[run(loop, calls) for _ in range(trajectories)])
    return (time.process_time() - started) / (trajectories * calls) * 1e6


async def main(rounds: int) -> dict[str, float]:
    """The medians over rounds."""
    loop, found = make_loop(), {}
    for name, trajectories, calls in (("verl_async_us", 1, 5000), ("verl_async_us_1000", 1000, 20)):
        costs = []
        for _ in range(rounds):
            bare = await measure(call_bare, loop, trajectories, calls)
            costs.append(await measure(call, loop, trajectories, calls) - bare)
        found[name] = round(statistics.median(costs), 1)
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(int(sys.argv[1])))))
