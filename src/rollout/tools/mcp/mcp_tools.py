"""Tools of any MCP server, offered as ours.

A server is shared by all trajectories over a few connections, or each trajectory has one of its
own. A connection lives in a task of its own, which starts the server again when it ends or freezes.
A trajectory stays on one connection while that lasts, because servers keep state.
"""

from __future__ import annotations

import json
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from rollout.errors import ToolError
from rollout.scopes import open_task_group
from rollout.tools.mcp.link import McpLink
from rollout.tools.mcp.links import McpLinks, OwnLinks, SharedLinks
from rollout.tools.mcp.sdk import import_sdk
from rollout.tools.mcp.transports import transport
from rollout.tools.results import ToolResult, error_result
from rollout.tools.tool import Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from rollout.types import ToolCall


@asynccontextmanager
async def connect_mcp(
    server: str | Sequence[str],
    *,
    tools: Sequence[str] | None = None,
    prefix: str = "",
    connections: int = 1,
    per_trajectory: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    headers: Mapping[str, str] | None = None,
    start_timeout_s: float = 30.0,
    ping_s: float | None = 10.0,
    max_answer_bytes: int = 2**20,
) -> AsyncIterator[list[Tool]]:
    """The tools of an MCP server, for `open_rollout`; the server is released at the block's end.

    Args:
        server: A URL (streamable HTTP), or a command with its arguments, which is run and
            connected over its standard input and output.
        tools: Names of those wanted, as the server calls them; None takes all.
        prefix: Put before each name, where servers have tools of equal names.
        connections: For a command, processes; trajectories are spread over them.
        per_trajectory: Each trajectory has a connection (for a command, a process) of its own,
            from its first call of one of the tools to its end.
        env, cwd: Of the command: variables added to a small safe set, and its directory.
        headers: Sent with each HTTP request.
        start_timeout_s: From starting a connection to its list of tools.
        ping_s: A server that says nothing for so long while a call waits is pinged; where it is
            silent for as long again, it is frozen, and restarted. So is one that does not
            answer the ping after a call that was given up. To be longer than the longest call of
            a server that does nothing else meanwhile; None never pings.
        max_answer_bytes: Longest answer that is read; an error takes the place of a longer one.

    Raises:
        ToolError: The extra is missing, an argument is wrong, the server does not answer in time,
            or lacks a tool.
    """
    label = server if isinstance(server, str) else " ".join(server)
    _check(server)
    _check_numbers(connections, per_trajectory, ping_s, max_answer_bytes)
    sdk = await anyio.to_thread.run_sync(import_sdk)  # it takes seconds
    new_transport = transport(
        sdk, server, env=env, cwd=cwd, headers=headers, max_bytes=max_answer_bytes
    )

    def new_link() -> McpLink:
        return McpLink(
            label,
            sdk,
            new_transport,
            start_timeout_s=start_timeout_s,
            ping_s=math.inf if ping_s is None else ping_s,
            max_bytes=max_answer_bytes,
        )

    async with open_task_group() as tasks:
        links = [new_link() for _ in range(connections)]
        async with open_task_group() as starting:
            handles = [starting.start_soon(tasks.start, link.keep) for link in links]
            for handle in handles:
                await handle.wait()
        wanted = _wanted(label, links[0].tools, tools)
        server_links: McpLinks = SharedLinks(links)
        if per_trajectory:
            await links[0].leave()
            server_links = OwnLinks(tasks, new_link)
        yield [_tool(server_links, tool, prefix) for tool in wanted]


def _wanted(label: str, offered: Sequence[Any], names: Sequence[str] | None) -> list[Any]:
    by_name = {tool.name: tool for tool in offered}
    unknown = [name for name in names or () if name not in by_name]
    if unknown:
        raise ToolError(
            f"MCP server {label!r} has no tool {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(map(repr, by_name)) or 'none'}"
        )
    return [by_name[name] for name in (by_name if names is None else names)]


def _check(server: str | Sequence[str]) -> None:
    if isinstance(server, str) and not server.startswith(("http://", "https://")):
        raise ToolError(
            f"connect_mcp: server = {server!r}: expected an http or https URL, or a command as a "
            "list"
        )
    if not server:
        raise ToolError("connect_mcp: server = []: expected a command with its arguments")


def _check_numbers(
    connections: int, per_trajectory: bool, ping_s: float | None, max_answer_bytes: int
) -> None:
    faults = []
    if connections < 1:
        faults.append(f"connections = {connections}: expected at least 1")
    if per_trajectory and connections > 1:
        faults.append(f"connections = {connections}: expected 1 with per_trajectory = True")
    if ping_s is not None and not 0 < ping_s < math.inf:
        faults.append(f"ping_s = {ping_s}: expected a number > 0 or None")
    if max_answer_bytes < 1:
        faults.append(f"max_answer_bytes = {max_answer_bytes}: expected at least 1")
    if faults:
        raise ToolError(f"connect_mcp: {'; '.join(faults)}")


def _tool(links: McpLinks, theirs: Any, prefix: str) -> Tool:
    tool = _McpTool()
    tool.name = prefix + theirs.name
    tool.schema = {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": theirs.description or theirs.title or theirs.name,
            "parameters": theirs.input_schema,
        },
    }
    tool.links = links
    tool.their_name = theirs.name
    hints = theirs.annotations
    tool.may_repeat = bool(hints and (hints.read_only_hint or hints.idempotent_hint))
    return tool


class _McpTool(Tool):
    """A tool of an MCP server.

    Attributes:
        may_repeat: The server says that a second call changes nothing more.
    """

    links: McpLinks
    their_name: str
    may_repeat: bool

    def unused_kwargs(self, kwargs: Mapping[str, Any]) -> list[str]:
        """All: a server takes what the model gives."""
        return sorted(kwargs)

    async def open(self, context: ToolContext) -> ToolSession:
        return _McpSession(await self.links.take(context), self)


class _McpSession(ToolSession):
    def __init__(self, link: McpLink, tool: _McpTool) -> None:
        self._link = link
        self._tool = tool

    async def execute(self, call: ToolCall) -> ToolResult:
        tool = self._tool
        answer = await self._link.call(tool.their_name, call.arguments, may_repeat=tool.may_repeat)
        return answer if isinstance(answer, ToolResult) else _result(tool.name, answer)

    async def close(self) -> None:
        await self._tool.links.give_back(self._link)


def _result(name: str, answer: Any) -> ToolResult:
    """The observation for a server's answer: its texts, and its images."""
    texts, images = [], []
    for block in answer.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "resource" and hasattr(block.resource, "text"):
            texts.append(block.resource.text)
        elif block.type == "resource_link":
            texts.append(f"{block.name}: {block.uri}")
        elif block.type == "image" or _is_picture(block):
            held = block.resource if block.type == "resource" else block
            content = held.blob if block.type == "resource" else held.data
            images.append({"type": "image", "data": content, "mimeType": held.mime_type})
        else:
            return error_result(
                f"{name}: the server answered with {block.type} content; only text and images can "
                f"be observed"
            )
    data = answer.structured_content
    if not texts and data is not None:
        texts.append(json.dumps(data, ensure_ascii=False))
    shown: dict[str, Any] = {"images": images} if images else {}
    return ToolResult("\n".join(texts), data=data, is_error=bool(answer.is_error), **shown)


def _is_picture(block: Any) -> bool:
    """Whether an embedded resource is an image."""
    resource = getattr(block, "resource", None)
    is_image = str(getattr(resource, "mime_type", None)).startswith("image/")
    return is_image and hasattr(resource, "blob")
