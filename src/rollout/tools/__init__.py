"""Tools: what models can call, and the executor that runs the calls.

What reads verl's formats lives in `rollout.integrations.verl` and is found here on first use.
"""

from __future__ import annotations

from rollout.errors import MediaError
from rollout.lazy import lazy_exports
from rollout.tools.builtin import SearchTool, calculator, finish, submit
from rollout.tools.executor import ToolExecutor, TrajectoryTools
from rollout.tools.function_tools import FunctionTool, function_tool
from rollout.tools.langchain import langchain_tools
from rollout.tools.loading import load_tools
from rollout.tools.mcp import connect_mcp
from rollout.tools.results import ToolResult, normalise_result, truncate_text
from rollout.tools.sandbox_tools import EditTool, PythonTool, ShellTool
from rollout.tools.tool import Tool, ToolContext, ToolPolicy, ToolSession, TransientError

__all__ = [
    "EditTool",
    "FunctionTool",
    "MediaError",
    "PythonTool",
    "SearchTool",
    "ShellTool",
    "Tool",
    "ToolContext",
    "ToolExecutor",
    "ToolPolicy",
    "ToolResult",
    "ToolSession",
    "TrajectoryTools",
    "TransientError",
    "VerlMultiTurn",
    "calculator",
    "connect_mcp",
    "finish",
    "function_tool",
    "langchain_tools",
    "load_tools",
    "load_verl_multi_turn",
    "load_verl_tools",
    "normalise_result",
    "submit",
    "truncate_text",
]
__getattr__ = lazy_exports(
    globals(),
    {"rollout.integrations.verl": ("VerlMultiTurn", "load_verl_multi_turn", "load_verl_tools")},
)
