"""Tools of any MCP server, offered as ours.

A server is shared by all trajectories over a few connections, or each trajectory has one of its
own. A connection lives in a task of its own, which connects again when the server ends or freezes.
A trajectory stays on one connection, because servers keep state.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import tempfile
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio

from rollout.errors import ToolError
from rollout.scopes import open_task_group, unwrap_group
from rollout.tools.mcp_transports import TOO_LONG, open_http, open_stdio
from rollout.tools.results import ToolResult, error_result
from rollout.tools.tool import Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from anyio import TaskHandle
    from anyio.abc import TaskStatus

    from rollout.types import ToolCall

logger = logging.getLogger("rollout.tools")

#: Seconds before a server that ended is connected again; doubled at each failure in a row, up to …
BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
#: Lines of a command's standard error that the error quotes where it does not start.
QUOTED_LINES = 10


class _Connection:
    """A connection to a server, kept up by a task of its own.

    Args:
        label: Names the server, for messages.
        open_transport: Opens a transport, with a file for a command's standard error, and what to
            call at its end.
        start_timeout_s, ping_s: See `connect_mcp`.

    Attributes:
        tools: What the server offered when it was last connected.
        task: The one that keeps it up.
    """

    task: TaskHandle[None]

    def __init__(
        self, label: str, open_transport: Callable[..., Any], start_timeout_s: float, ping_s: float
    ) -> None:
        self._label, self._open_transport = label, open_transport
        self._start_timeout_s, self._ping_s = start_timeout_s, ping_s
        self.tools: list[Any] = []
        self._client: Any = None  # the SDK's, while the server can be called
        self._fault = ""  # what became of the server
        #: Set where there is a client, or connecting has failed; and where the server is lost.
        self._tried, self._ended = anyio.Event(), anyio.Event()

    async def keep(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Connect, and connect again when the server ends, until cancelled.

        Raises:
            ToolError: The first connection failed; later failures are logged, and tried again.
        """
        backoff_s, is_first = BACKOFF_S, True
        while True:
            was_there = await self._serve(task_status)
            if is_first and not was_there:
                raise ToolError(f"MCP server {self._label!r}: {self._fault}")
            is_first, task_status = False, anyio.TASK_STATUS_IGNORED
            backoff_s = BACKOFF_S if was_there else min(2 * backoff_s, MAX_BACKOFF_S)
            logger.warning("MCP server %r: %s; connecting again", self._label, self._fault)
            await anyio.sleep(backoff_s)

    async def leave(self) -> None:
        """End the connection and its task; returns when both have ended."""
        self.task.cancel()
        await self.task.wait()

    async def _serve(self, task_status: TaskStatus[None]) -> bool:
        """Connect, and stay until the server is lost; False where it could not be reached."""
        from mcp import Client

        self._ended = anyio.Event()
        client, fault = None, "it ended while starting"
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            # The deadline is lifted once the server has answered: a scope around the start alone
            # could not be left before those that the client opens within it.
            scope = anyio.CancelScope(deadline=anyio.current_time() + self._start_timeout_s)
            try:
                with scope:
                    async with Client(self._open_transport(errors, self._ended.set)) as starting:
                        self.tools = await _list_tools(starting)
                        client = self._client = starting
                        self._fault, scope.deadline = "ended", math.inf
                        self._tried.set()
                        task_status.started()
                        await self._wait_for_end(client)
                        scope.cancel()  # a frozen server may block a farewell
            except Exception as error:
                leaf = unwrap_group(error) if isinstance(error, BaseExceptionGroup) else error
                fault = f"{type(leaf).__name__}: {leaf}"
            finally:
                self._lose(client)
            if client is None:
                if scope.cancelled_caught:
                    fault = f"no answer within start_timeout_s = {self._start_timeout_s:g} s"
                errors.seek(0)
                lines = map(str.rstrip, errors.read().splitlines()[-QUOTED_LINES:])
                self._fault = "\n    ".join([fault, *lines])
                self._tried.set()
        return client is not None

    async def _wait_for_end(self, client: Any) -> None:
        """Return once the server has ended, or answers no ping."""
        from mcp import MCPError

        while True:
            with anyio.move_on_after(self._ping_s):
                await self._ended.wait()
                return
            with anyio.move_on_after(self._ping_s) as scope:
                with suppress(MCPError):  # an answer as well: newer servers know no ping
                    await client.session.send_ping()
            if scope.cancelled_caught:
                self._fault = f"was silent for {self._ping_s:g} s, even to a ping"
                return

    def _lose(self, client: Any) -> None:
        """A client is of no more use."""
        if client is not None and client is self._client:
            self._client, self._tried = None, anyio.Event()
            self._ended.set()

    async def call(self, name: str, arguments: Mapping[str, Any], *, may_repeat: bool) -> Any:
        """Call a tool of the server's; waits for a connection that is being made again.

        Raises:
            ToolError: The server refused the call, or cannot be reached again; or it ended or
                froze with the call under way, and a repeat might do harm.
        """
        import mcp_types
        from mcp import MCPError

        while True:
            if self._client is None:
                await self._tried.wait()
            if (client := self._client) is None:
                raise ToolError(
                    f"the MCP server is not there ({self._fault}), and is being started again; "
                    "not called"
                )
            try:
                return await client.call_tool(name, dict(arguments))
            except MCPError as error:
                if error.code != mcp_types.CONNECTION_CLOSED or TOO_LONG in error.message:
                    raise ToolError(error.message) from None
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                pass
            fault = self._fault
            self._lose(client)
            if not may_repeat:
                raise ToolError(
                    f"the MCP server {fault} during this call, and is being started again; "
                    "whether the call took effect is unknown"
                )


async def _list_tools(client: Any) -> list[Any]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


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
        ping_s: The server is pinged so often; where it does not answer within as long, it is
            frozen, and started again. To be longer than the longest call of a server that does
            nothing else meanwhile; None never pings.
        max_answer_bytes: Longest answer that is kept; an error takes the place of a longer one.

    Raises:
        ToolError: The extra is missing, an argument is wrong, the server does not answer in time,
            or lacks a tool.
    """
    faults = []
    if not server:
        faults.append("server = []: expected a command with its arguments")
    elif isinstance(server, str) and not server.startswith(("http://", "https://")):
        expected = "expected an http or https URL, or a command as a list"
        faults.append(f"server = {server!r}: {expected}")
    if connections < 1 or (per_trajectory and connections > 1):
        expected = "1 with per_trajectory = True" if per_trajectory else "at least 1"
        faults.append(f"connections = {connections}: expected {expected}")
    if ping_s is not None and not 0 < ping_s < math.inf:
        faults.append(f"ping_s = {ping_s}: expected a number > 0 or None")
    if max_answer_bytes < 1:
        faults.append(f"max_answer_bytes = {max_answer_bytes}: expected at least 1")
    if faults:
        raise ToolError(f"connect_mcp: {'; '.join(faults)}")
    await anyio.to_thread.run_sync(_import_sdk)  # it takes seconds
    label = server if isinstance(server, str) else " ".join(server)

    def open_transport(errors: Any, on_end: Callable[[], None]) -> Any:
        if isinstance(server, str):
            return open_http(server, headers, max_answer_bytes)
        return open_stdio(server, errors, on_end, env=env, cwd=cwd, max_bytes=max_answer_bytes)

    async with open_task_group() as tasks:

        async def connect() -> _Connection:
            wait_s = math.inf if ping_s is None else ping_s
            connection = _Connection(label, open_transport, start_timeout_s, wait_s)
            connection.task = await tasks.start(connection.keep, return_handle=True)
            return connection

        async with open_task_group() as starting:
            handles = [starting.start_soon(connect) for _ in range(connections)]
            for handle in handles:
                await handle.wait()
        shared = [handle.return_value for handle in handles]
        offered = {tool.name: tool for tool in shared[0].tools}
        unknown = ", ".join(repr(name) for name in tools or () if name not in offered)
        if unknown:
            known = ", ".join(map(repr, offered)) or "none"
            raise ToolError(f"MCP server {label!r} has no tool {unknown}; it has {known}")
        if per_trajectory:
            await shared.pop().leave()
        ring = itertools.cycle(shared)

        async def share() -> _Connection:
            return next(ring)

        acquire = connect if per_trajectory else share
        names = offered if tools is None else tools
        yield [_McpTool(offered[name], prefix, acquire, owns=per_trajectory) for name in names]


def _import_sdk() -> None:
    try:
        import httpx2  # noqa: F401
        import mcp.client.stdio
        import mcp.client.streamable_http  # noqa: F401
    except ImportError as error:
        raise ToolError(
            f'connect_mcp needs the MCP SDK: pip install "rollout-rl[mcp]" ({error})'
        ) from error


class _McpTool(Tool):
    """A tool of an MCP server.

    Args:
        theirs: The SDK's.
        prefix: See `connect_mcp`.
        acquire: Gives a trajectory its connection.
        owns: Whether nobody else is on that; it ends with the trajectory then.

    Attributes:
        may_repeat: The server says that a second call changes nothing more.
    """

    def __init__(
        self, theirs: Any, prefix: str, acquire: Callable[[], Awaitable[_Connection]], *, owns: bool
    ) -> None:
        self._acquire, self._owns = acquire, owns
        self.name, self.their_name = prefix + theirs.name, theirs.name
        description = theirs.description or theirs.title or theirs.name
        function = {"name": self.name, "description": description}
        function["parameters"] = theirs.input_schema
        self.schema = {"type": "function", "function": function}
        hints = theirs.annotations
        self.may_repeat = bool(hints and (hints.read_only_hint or hints.idempotent_hint))

    async def open(self, context: ToolContext) -> ToolSession:
        """A session on the trajectory's connection, which the first of its tools acquires."""
        key = f"{__name__}.{id(self._acquire)}"
        if key in context.state:  # a trajectory opens its tools one after another
            return _McpSession(context.state[key], self)
        connection = context.state[key] = await self._acquire()
        return (_OwningSession if self._owns else _McpSession)(connection, self)


class _McpSession(ToolSession):
    def __init__(self, connection: _Connection, tool: _McpTool) -> None:
        self._connection, self._tool = connection, tool

    async def execute(self, call: ToolCall) -> ToolResult:
        name, may_repeat = self._tool.their_name, self._tool.may_repeat
        answer = await self._connection.call(name, call.arguments, may_repeat=may_repeat)
        return _make_result(self._tool.name, answer)


class _OwningSession(_McpSession):
    """Of the tool that a trajectory opened first, and closes last: the connection ends with it."""

    async def close(self) -> None:
        await self._connection.leave()


def _make_result(name: str, answer: Any) -> ToolResult:
    """The observation for a server's answer: its texts, and its images."""
    texts, images = [], []
    for block in answer.content:
        content = block.resource if block.type == "resource" else block
        if hasattr(content, "text"):
            texts.append(content.text)
        elif block.type == "resource_link":
            texts.append(f"{block.name}: {block.uri}")
        elif str(getattr(content, "mime_type", None)).startswith("image/"):
            data = content.blob if block.type == "resource" else content.data
            images.append({"type": "image", "data": data, "mimeType": content.mime_type})
        else:
            return error_result(
                f"{name}: the server answered with {block.type} content; only text and images can "
                f"be observed"
            )
    data = answer.structured_content
    if not texts and data is not None:
        texts.append(json.dumps(data, ensure_ascii=False))
    is_error = bool(answer.is_error)
    return ToolResult("\n".join(texts), data=data, is_error=is_error, images=tuple(images))
