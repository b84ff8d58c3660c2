"""Tools of any MCP server, offered as ours.

A server is shared by all trajectories over a few connections, or each trajectory has one of its
own. A connection lives in a task of its own, which connects again when the server ends or freezes.
A trajectory stays on one connection while that lasts, because servers keep state.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio

from rollout.errors import ToolError
from rollout.scopes import open_task_group, unwrap_group
from rollout.tools.mcp_transports import describe_long_answer, open_http, open_stdio
from rollout.tools.results import ToolResult, error_result
from rollout.tools.tool import Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from rollout.types import ToolCall

logger = logging.getLogger("rollout.tools")

#: Seconds before a server that ended is connected again; doubled at each failure in a row, up to …
BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
#: Lines of a command's standard error that an error text quotes, and bytes that are looked at.
QUOTED_LINES, QUOTED_BYTES = 10, 16_384

#: Opens a transport, with a file for a command's standard error, and what to call at its end.
OpenTransport = Callable[[Any, Callable[[], None]], AbstractAsyncContextManager[Any]]


class _Connection:
    """A connection to a server, kept up by a task of its own; the arguments are `connect_mcp`'s.

    Attributes:
        tools: What the server offered when it was last connected.
        users: Sessions of tools that are on it.
    """

    def __init__(
        self,
        label: str,
        open_transport: OpenTransport,
        *,
        start_timeout_s: float,
        ping_s: float,
        max_bytes: int,
    ) -> None:
        self._label, self._open_transport = label, open_transport
        self._start_timeout_s, self._ping_s, self._max_bytes = start_timeout_s, ping_s, max_bytes
        self.tools: list[Any] = []
        self.users = 0
        self._client: Any = None  # the SDK's, while the server can be called
        self._fault, self._pending = "", 0  # what became of the server; calls that wait for it
        #: Set where there is a client, or connecting has failed.
        self._tried = anyio.Event()
        #: Set where the server is of no more use, or a call was given up that it may have frozen.
        self._ended, self._doubted = anyio.Event(), anyio.Event()
        self._scope, self._left = anyio.CancelScope(), anyio.Event()

    async def keep(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Connect, and connect again when the server ends, until `leave`.

        Raises:
            ToolError: The first connection failed; later failures are logged, and tried again.
        """
        backoff_s, is_first = BACKOFF_S, True
        try:
            with self._scope:
                while True:
                    was_there = await self._serve(task_status)
                    if is_first and not was_there:
                        raise ToolError(f"MCP server {self._label!r}: {self._fault}")
                    is_first, task_status = False, anyio.TASK_STATUS_IGNORED
                    backoff_s = BACKOFF_S if was_there else min(2 * backoff_s, MAX_BACKOFF_S)
                    text = "MCP server %r: %s; connecting again"
                    logger.warning(text, self._label, self._fault)
                    await anyio.sleep(backoff_s)
        finally:
            self._left.set()

    async def leave(self) -> None:
        """End the connection and the task that keeps it; returns when both have ended."""
        self._scope.cancel()
        await self._left.wait()

    async def _serve(self, task_status: TaskStatus[None]) -> bool:
        """Connect, and stay until the server ends; False where it could not be reached."""
        from mcp import Client

        self._ended, self._doubted = anyio.Event(), anyio.Event()
        client, fault = None, "it ended while starting"
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            # The deadline is lifted once the server has answered: a scope around the start alone
            # could not be left before those that the client opens within it.
            scope = anyio.CancelScope(deadline=anyio.current_time() + self._start_timeout_s)
            try:
                with scope:
                    transport = self._open_transport(errors, self._ended.set)
                    async with Client(transport) as starting:
                        self.tools = await _list_tools(starting)
                        client = self._client = starting
                        self._fault, scope.deadline = "ended", math.inf
                        self._tried.set()
                        task_status.started()
                        async with open_task_group() as tasks:
                            tasks.start_soon(self._watch, client)
                            await self._ended.wait()
                        scope.cancel()  # a frozen server may block a farewell
            except Exception as error:
                leaf = unwrap_group(error) if isinstance(error, BaseExceptionGroup) else error
                fault = f"{type(leaf).__name__}: {leaf}"
            finally:
                self._lose(client)
            if client is None:
                if scope.cancelled_caught:
                    fault = f"no answer within start_timeout_s = {self._start_timeout_s:g} s"
                self._fault = fault + _read_last_lines(errors)
                self._tried.set()
        return client is not None

    async def _watch(self, client: Any) -> None:
        """End the connection once the server answers no ping.

        It is pinged while calls wait for it, every `ping_s`, and at once when one was given up.
        """
        from mcp import MCPError

        while True:
            with anyio.move_on_after(self._ping_s):
                await self._doubted.wait()
            if not (self._pending or self._doubted.is_set()):
                continue
            self._doubted = anyio.Event()
            with anyio.move_on_after(self._ping_s) as scope:
                with suppress(MCPError):  # an answer as well: newer servers know no ping
                    await client.session.send_ping()
            if scope.cancelled_caught:
                self._fault = f"was silent for {self._ping_s:g} s, even to a ping"
                self._ended.set()

    def _lose(self, client: Any) -> None:
        """A client is of no more use."""
        if self._client is client and client is not None:
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
            client = self._client
            if client is None:
                raise ToolError(
                    f"the MCP server is not there ({self._fault}), and is being started again; "
                    "not called"
                )
            self._pending += 1
            try:
                return await client.call_tool(name, dict(arguments))
            except MCPError as error:
                if "Server-sent event exceeded" in error.message:
                    raise ToolError(describe_long_answer(self._max_bytes)) from None
                if error.code != mcp_types.CONNECTION_CLOSED:
                    raise ToolError(str(error.message)) from None
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                pass
            except anyio.get_cancelled_exc_class():
                self._doubted.set()
                raise
            finally:
                self._pending -= 1
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


def _read_last_lines(errors: Any) -> str:
    """The end of what a command wrote to its standard error."""
    end = errors.seek(0, 2)
    errors.seek(max(0, end - QUOTED_BYTES))
    return "".join(f"\n    {line.rstrip()}" for line in errors.read().splitlines()[-QUOTED_LINES:])


class _Connections:
    """Which connection a trajectory is on: one of a few `shared`, or one of its own.

    Its own one is made with its first tool and ended with its last; its task is one of `tasks`.
    """

    def __init__(
        self, shared: Sequence[_Connection], tasks: TaskGroup, make: Callable[[], _Connection]
    ) -> None:
        self._shared, self._tasks, self._make = shared, tasks, make
        self._own: dict[int, _Connection] = {}  # by the state that the trajectory's tools share

    async def acquire(self, context: ToolContext) -> _Connection:
        """The connection for one tool of a trajectory; `release` it."""
        if self._shared:
            connection = min(self._shared, key=lambda each: each.users)
        elif id(context.state) in self._own:  # a trajectory opens its tools one after another
            connection = self._own[id(context.state)]
        else:
            connection = self._make()
            await self._tasks.start(connection.keep)
            self._own[id(context.state)] = connection
        connection.users += 1
        return connection

    async def release(self, connection: _Connection) -> None:
        """One user of the connection less."""
        connection.users -= 1
        if not connection.users and connection not in self._shared:
            self._own = {key: each for key, each in self._own.items() if each is not connection}
            await connection.leave()


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
        ping_s: While calls wait for it a server is pinged so often, and at once after a call that
            was given up; where it does not answer within as long, it is frozen, and started again.
            To be longer than the longest call of a server that does nothing else meanwhile; None
            never pings.
        max_answer_bytes: Longest answer that is read; an error takes the place of a longer one.

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
        return open_stdio(
            server, env=env, cwd=cwd, errors=errors, max_bytes=max_answer_bytes, on_end=on_end
        )

    def make() -> _Connection:
        return _Connection(
            label,
            open_transport,
            start_timeout_s=start_timeout_s,
            ping_s=math.inf if ping_s is None else ping_s,
            max_bytes=max_answer_bytes,
        )

    async with open_task_group() as tasks:
        shared = [make() for _ in range(connections)]
        async with open_task_group() as starting:
            handles = [starting.start_soon(tasks.start, each.keep) for each in shared]
            for handle in handles:
                await handle.wait()
        offered = {tool.name: tool for tool in shared[0].tools}
        unknown = [name for name in tools or () if name not in offered]
        if unknown:
            raise ToolError(
                f"MCP server {label!r} has no tool {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(map(repr, offered)) or 'none'}"
            )
        if per_trajectory:
            await shared.pop().leave()
        found = _Connections(shared, tasks, make)
        names = offered if tools is None else tools
        yield [_McpTool(found, offered[name], prefix) for name in names]


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

    Attributes:
        may_repeat: The server says that a second call changes nothing more.
    """

    def __init__(self, connections: _Connections, theirs: Any, prefix: str) -> None:
        self.connections, self.their_name = connections, theirs.name
        self.name = prefix + theirs.name
        description = theirs.description or theirs.title or theirs.name
        function = {"name": self.name, "description": description}
        function["parameters"] = theirs.input_schema
        self.schema = {"type": "function", "function": function}
        hints = theirs.annotations
        self.may_repeat = bool(hints and (hints.read_only_hint or hints.idempotent_hint))

    async def open(self, context: ToolContext) -> ToolSession:
        return _McpSession(await self.connections.acquire(context), self)


class _McpSession(ToolSession):
    def __init__(self, connection: _Connection, tool: _McpTool) -> None:
        self._connection, self._tool = connection, tool

    async def execute(self, call: ToolCall) -> ToolResult:
        name, may_repeat = self._tool.their_name, self._tool.may_repeat
        answer = await self._connection.call(name, call.arguments, may_repeat=may_repeat)
        return _make_result(self._tool.name, answer)

    async def close(self) -> None:
        await self._tool.connections.release(self._connection)


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
