"""LangChain's tools as ours. Needs the extra ``langchain`` (langchain-core)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.errors import MediaError, ToolError
from rollout.lazy import derives_from
from rollout.media.parts import media_part
from rollout.tools.results import ToolResult, split_media
from rollout.tools.schemas import inline_references
from rollout.tools.tool import METHOD_KWARGS, Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollout.types import ToolCall


class LangChainTool(Tool):
    """A tool of LangChain: an async one runs on asyncio, a sync one in a worker thread.

    Args:
        tool: A `langchain_core.tools.BaseTool`, such as what its decorator ``@tool`` makes.

    Raises:
        ToolError: It is none, langchain-core is not installed, or its schema contains itself.
    """

    def __init__(self, tool: Any) -> None:
        try:
            from langchain_core.tools import BaseTool
        except ImportError as error:
            raise ToolError(
                f"LangChain's tools need langchain-core ({error}): "
                "pip install 'rollout-rl[langchain]'"
            ) from error
        if not isinstance(tool, BaseTool):
            raise ToolError(f"{tool!r:.200} is no tool of LangChain: expected a BaseTool")
        self.tool = tool
        self.origin = f"LangChain's {tool.name!r}"
        self.name = tool.name
        try:
            written: Any = tool.tool_call_schema  # without what LangChain injects
            schema = written if isinstance(written, dict) else written.model_json_schema()
            parameters = inline_references({k: v for k, v in schema.items() if k != "description"})
        except TypeError as error:
            raise ToolError(f"{self.origin}: {error}") from error
        function = {"name": tool.name, "description": tool.description, "parameters": parameters}
        self.schema = {"type": "function", "function": function}
        # A tool without a coroutine of its own runs its function on a thread of asyncio's.
        self.is_async = getattr(tool, "coroutine", None) is not None or (
            type(tool)._arun is not BaseTool._arun and not hasattr(tool, "coroutine")
        )

    async def open(self, context: ToolContext) -> ToolSession:
        """A session; the tool itself is shared by all trajectories."""
        return _LangChainSession(self, context)


class _LangChainSession(ToolSession):
    def __init__(self, tool: LangChainTool, context: ToolContext) -> None:
        self._tool = tool
        self._context = context

    async def execute(self, call: ToolCall) -> Any:
        ours, threads = self._tool, self._context.threads
        ignored = METHOD_KWARGS - set(ours.tool.args)
        kwargs = {k: v for k, v in self._context.kwargs.items() if k not in ignored}
        # In this form the tool answers with a message, which has its artifact and its status.
        request = {
            "type": "tool_call",
            "id": call.id or "call",
            "name": ours.name,
            "args": {**call.arguments, **kwargs},
        }
        if ours.is_async:
            message = await threads.run_asyncio(ours.name, ours.tool.ainvoke, request)
        else:
            message = await threads.run(ours.name, ours.tool.invoke, request)
        content = message.content
        blocks = [content] if isinstance(content, str) else content
        media = [media_part("a content block of LangChain's", block) for block in blocks]
        texts = [block for block, each in zip(blocks, media, strict=True) if each is None]
        images, videos = split_media(media)
        return ToolResult(
            "".join(map(_read_text, texts)),
            data=getattr(message, "artifact", None),
            is_error=getattr(message, "status", "success") == "error",
            images=tuple(images),
            videos=tuple(videos),
        )


def _read_text(block: Any) -> str:
    if isinstance(block, str):
        return block
    if block.get("type") != "text":
        raise MediaError(f"a content block of type {block.get('type')!r}: expected text or images")
    return str(block["text"])


def is_langchain_tool(value: Any) -> bool:
    """Whether `value` is a tool of LangChain; nothing is imported to find out."""
    return derives_from(type(value), "langchain_core.tools.base", "BaseTool")


def langchain_tools(tools: Iterable[Any]) -> list[Tool]:
    """Each of LangChain's tools as one of ours.

    Raises:
        ToolError: One is no such tool, or langchain-core is not installed.
    """
    return [LangChainTool(tool) for tool in tools]
