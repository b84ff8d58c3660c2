"""What tests of tools share: an executor with the usual bounds, and calls of one turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.limits import Clock, Deadline
from rollout.tools import ToolExecutor, ToolResult, TrajectoryTools
from rollout.types import InvalidToolCall, ToolCall
from rollout.worker_threads import WorkerThreads


def executor_of(tools: Sequence[Any], threads: WorkerThreads, **settings: Any) -> ToolExecutor:
    """An executor of these tools; `settings` stand in place of the usual bounds."""
    usual: dict[str, Any] = {
        "max_parallel_calls": 8,
        "max_response_length": 4096,
        "truncate_side": "middle",
        "tool_s": 10.0,
        "cleanup_s": 5.0,
    }
    return ToolExecutor(tools, threads=threads, **{**usual, **settings})


def call(tool: str, /, **arguments: Any) -> ToolCall:
    """A call of a tool."""
    return ToolCall(name=tool, arguments=arguments)


async def run(
    tools: TrajectoryTools, *calls: ToolCall | InvalidToolCall, turn_s: float = 100.0
) -> list[ToolResult]:
    """The results of one turn's calls."""
    return await tools.run(calls, limit=Clock(Deadline.after(turn_s, "limits.turn_s")))
