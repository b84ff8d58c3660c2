"""LangChain's tools as ours. Needs the extra ``langchain`` (langchain-core)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import ToolError
from rollout.lazy import derives_from, import_extra
from rollout.tools.function_tools import FunctionTool
from rollout.tools.results import ToolResult, read_parts
from rollout.tools.schemas import inline_references

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollout.tools.tool import Tool


def langchain_tools(tools: Iterable[Any]) -> list[Tool]:
    """Each `langchain_core.tools.BaseTool` as one of ours; a `ToolError` where one cannot be."""
    return [wrap_langchain_tool(tool) for tool in tools]


def is_langchain_tool(value: Any) -> bool:
    """Whether `value` is a tool of LangChain; nothing is imported to find out."""
    return derives_from(type(value), "langchain_core.tools.base", "BaseTool")


def wrap_langchain_tool(tool: Any) -> Tool:
    """One of LangChain's tools as one of ours; see `langchain_tools`."""
    module = import_extra("langchain_core.tools", "langchain", "a tool of LangChain", ToolError)
    BaseTool: Any = module.BaseTool  # noqa: N806
    if not isinstance(tool, BaseTool):
        raise ToolError(f"{tool!r:.200} is no tool of LangChain: expected a BaseTool")
    try:
        written: Any = tool.tool_call_schema  # without what LangChain injects
        schema = written if isinstance(written, dict) else written.model_json_schema()
        parameters = inline_references({k: v for k, v in schema.items() if k != "description"})
    except TypeError as error:
        raise ToolError(f"LangChain's {tool.name!r}: {error}") from error
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}

    def write_request(arguments: dict[str, Any]) -> dict[str, Any]:
        # In this form the tool answers with a message, which has its artifact and its status.
        return {"type": "tool_call", "name": tool.name, "id": "call", "args": arguments}

    async def run_async(**arguments: Any) -> ToolResult:
        return _read_message(await tool.ainvoke(write_request(arguments)))

    def run(**arguments: Any) -> ToolResult:
        return _read_message(tool.invoke(write_request(arguments)))

    # A tool without a coroutine of its own runs its function on a thread of asyncio's.
    is_async = getattr(tool, "coroutine", None) is not None or (
        type(tool)._arun is not BaseTool._arun and not hasattr(tool, "coroutine")
    )
    run_either: Any = run_async if is_async else run
    return FunctionTool(run_either, schema=function, backend="asyncio", stateful=True)


def _read_message(message: Any) -> ToolResult:
    blocks = [message.content] if isinstance(message.content, str) else message.content
    return msgspec.structs.replace(
        read_parts("LangChain's answer", blocks, ""),
        data=getattr(message, "artifact", None),
        is_error=getattr(message, "status", "success") == "error",
    )
