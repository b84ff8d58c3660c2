"""Tools of any MCP server, offered as ours.

All trajectories share a server over a few connections, or each has one of its own. A trajectory
stays on one connection, because servers keep state.
"""

from __future__ import annotations

import itertools
import json
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import msgspec

from rollout.config.checks import Count, Positive, Rule, is_http_url
from rollout.errors import ToolError
from rollout.lazy import import_extra
from rollout.scopes import open_task_group
from rollout.tools.results import ToolResult, read_parts
from rollout.tools.schemas import quote_all
from rollout.tools.tool import Tool, ToolContext, ToolSession, check_options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from rollout.tools.mcp_connection import Connection
    from rollout.types import ToolCall

Server = Annotated[
    object,
    Rule(
        "an http or https URL, or a list of a command and its arguments",
        lambda server: is_http_url(server) if isinstance(server, str) else bool(server),
    ),
]


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
        per_trajectory: Each trajectory has a connection, and process, of its own, from its first
            call of one of the tools to its end.
        env, cwd: Of the command: variables added to a small safe set, and its directory.
        headers: Sent with each HTTP request.
        start_timeout_s: From starting a connection to its list of tools.
        ping_s: Seconds between pings, and for their answer, without which the server is started
            again: more than the longest call of a server that is silent meanwhile. None: no pings.
        max_answer_bytes: Longest answer that is kept; an error takes the place of a longer one.

    A `ToolError` where the extra is missing, an argument is wrong, the server does not answer in
    time, or lacks a tool.
    """
    alone = Annotated[int, Rule("1 with per_trajectory = True", lambda count: count == 1)]
    check_options(
        "connect_mcp",
        server=(Server, server),
        connections=(alone if per_trajectory else Count, connections),
        ping_s=(Positive | None, ping_s),
        max_answer_bytes=(Count, max_answer_bytes),
    )
    label = server if isinstance(server, str) else " ".join(server)
    names = "rollout.tools.mcp_connection", "mcp", "connect_mcp", ToolError
    sdk: Any = await anyio.to_thread.run_sync(import_extra, *names)  # it takes seconds

    open_stdio = partial(sdk.open_stdio, server, max_answer_bytes, env=env, cwd=cwd)
    open_http = partial(sdk.open_http, server, max_answer_bytes, headers=headers)
    options = label, open_http if isinstance(server, str) else open_stdio, start_timeout_s, ping_s

    def connect() -> Any:
        return sdk.keep_up([sdk.Connection(*options) for _ in range(connections)])

    async with open_task_group() as tasks, AsyncExitStack() as stack:
        shared: list[Connection] = await stack.enter_async_context(connect())
        offered = {tool.name: tool for tool in shared[0].tools}
        if unknown := [name for name in tools or () if name not in offered]:
            lacks = f"has no tool {quote_all(unknown)}; it has {quote_all(offered)}"
            raise ToolError(f"MCP server {label!r} {lacks}")
        if per_trajectory:
            await stack.aclose()
            shared.clear()
        hold = partial(tasks.start, _hold, connect)
        ring, wanted = itertools.cycle(shared), offered if tools is None else tools
        yield [_McpTool(offered[name], prefix, ring, hold) for name in wanted]


class _McpTool(Tool):
    """A tool of a server's; trajectories share the connections of `ring`, or have their own."""

    def __init__(
        self, theirs: Any, prefix: str, ring: Iterator[Connection], connect: Callable[[], Any]
    ) -> None:
        self._ring, self._connect = ring, connect
        self.name, self.their_name = prefix + theirs.name, theirs.name
        text = theirs.description or theirs.title or theirs.name
        function = {"name": self.name, "description": text, "parameters": theirs.input_schema}
        self.schema = {"type": "function", "function": function}

    async def open(self, context: ToolContext) -> ToolSession:
        """A session on the trajectory's connection, which the first of its tools acquires."""
        key = f"{__name__}.{id(self._connect)}"
        if (connection := context.state.get(key) or next(self._ring, None)) is None:
            context.state[key], *held = await self._connect()
            return _OwningSession(context.state[key], self.their_name, *held)
        context.state[key] = connection
        return _McpSession(connection, self.their_name)


async def _hold(connect: Callable[[], Any], *, task_status: Any) -> None:
    """Keep up a trajectory's own connection until its scope is cancelled; then set the event."""
    ended = anyio.Event()
    try:
        with anyio.CancelScope() as scope:
            async with connect() as (connection,):
                task_status.started((connection, scope, ended))
                await anyio.sleep_forever()
    finally:
        ended.set()


class _McpSession(ToolSession):
    def __init__(self, connection: Connection, name: str, *held: Any) -> None:
        self._connection, self._name, self._held = connection, name, held

    async def execute(self, call: ToolCall) -> ToolResult:
        return _make_result(await self._connection.call(self._name, dict(call.arguments)))


class _OwningSession(_McpSession):
    """Of the tool that a trajectory opened first, and closes last: the connection ends with it."""

    async def close(self) -> None:
        scope, ended = self._held
        scope.cancel()
        await ended.wait()  # a server that lingers is left to `connect_mcp`


def _make_result(answer: Any) -> ToolResult:
    """The observation for a server's answer: its texts, and its images."""
    shown = read_parts("the MCP server's answer", map(_read_block, answer.content))
    data, text = answer.structured_content, shown.text
    if not text and data is not None:
        text = json.dumps(data, ensure_ascii=False)
    return msgspec.structs.replace(shown, text=text, data=data, is_error=bool(answer.is_error))


def _read_block(block: Any) -> str | dict[str, Any]:
    """A block of a server's answer as a text or a part."""
    content = block.resource if block.type == "resource" else block
    if block.type == "resource_link":
        return f"{block.name}: {block.uri}"
    if hasattr(content, "text"):
        return str(content.text)
    if not str(mime := getattr(content, "mime_type", None)).startswith("image/"):
        return {"type": block.type}
    data = content.blob if block.type == "resource" else content.data
    return {"type": "image", "data": data, "mimeType": mime}
