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
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio

from rollout.errors import ToolError
from rollout.scopes import open_task_group, unwrap_group
from rollout.tools.mcp_transports import describe_long_answer, open_http, open_stdio
from rollout.tools.results import ToolResult, error_result
from rollout.tools.tool import Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from anyio.abc import TaskGroup, TaskStatus

    from rollout.types import ToolCall

    #: Opens a transport of a link; a command's standard error goes to the file.
    OpenTransport = Callable[["_Link", Any], AbstractAsyncContextManager[Any]]

logger = logging.getLogger("rollout.tools")

#: Seconds before a server that ended is connected again; doubled at each failure in a row, up to …
BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
#: Seconds for leaving a server in good order, beyond which the connection is cut.
LEAVE_S = 4.0
#: Lines of a command's standard error that an error text quotes, and bytes that are looked at.
QUOTED_LINES, QUOTED_BYTES = 10, 16_384


class _Link:
    """One connection from its start to its end.

    Attributes:
        client: The SDK's; None until the server has answered.
        ended: It is of no more use.
        how: What became of the server.
        pending: Calls that wait for its answer.
        doubted: A call was given up, and the server may be the reason.
    """

    def __init__(self) -> None:
        self.client: Any = None
        self.ended, self.doubted = anyio.Event(), anyio.Event()
        self.how, self.is_frozen, self.pending = "ended", False, 0

    async def watch(self, ping_s: float) -> None:
        """Return once the server answers no ping.

        It is pinged while calls wait for it, every `ping_s`, and at once when one was given up.
        """
        from mcp import MCPError

        while True:
            with anyio.move_on_after(ping_s):
                await self.doubted.wait()
            if not (self.pending or self.doubted.is_set()):
                continue
            self.doubted = anyio.Event()
            with anyio.move_on_after(ping_s) as scope:
                with suppress(MCPError):  # an answer as well: newer servers know no ping
                    await self.client.session.send_ping()
            if scope.cancelled_caught:
                self.is_frozen = True
                self.how = f"was silent for {ping_s:g} s, even to a ping"
                return


class McpConnection:
    """A connection to a server, kept up by a task of its own.

    Args:
        label: Names the server.
        open_transport: Opens a transport for each link.
        start_timeout_s: From starting a link to its list of tools.
        ping_s: See `connect_mcp`; infinite where no server is ever taken for frozen.
        max_bytes: Longest answer that is read.

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
        self._link: _Link | None = None
        self._starting = anyio.CancelScope()
        self._fault = ""
        #: Set where there is a link, or making one has failed.
        self._tried = anyio.Event()
        self._leaving, self._left = anyio.Event(), anyio.Event()

    async def keep(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Connect, and connect again when the server ends, until `leave`.

        Raises:
            ToolError: The first connection failed; later failures are logged, and tried again.
        """
        backoff_s, is_first = BACKOFF_S, True
        try:
            while True:
                link = _Link()
                await self._serve(link, task_status)
                if is_first and link.client is None:
                    raise ToolError(f"MCP server {self._label!r}: {self._fault}")
                is_first, task_status = False, anyio.TASK_STATUS_IGNORED
                if self._leaving.is_set():
                    return
                backoff_s = BACKOFF_S if link.client else min(2 * backoff_s, MAX_BACKOFF_S)
                why = self._fault or link.how
                logger.warning("MCP server %r: %s; connecting again", self._label, why)
                with anyio.move_on_after(backoff_s):
                    await self._leaving.wait()
                    return
        finally:
            self._left.set()

    async def leave(self) -> None:
        """End the connection and the task that keeps it; returns when both have ended."""
        self._leaving.set()
        self._starting.cancel()
        if self._link is not None:
            self._link.ended.set()
        await self._left.wait()

    async def _serve(self, link: _Link, task_status: TaskStatus[None]) -> None:
        """One link from its start to its end; where it could not be made, `_fault` says why."""
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            fault = "it ended while starting"
            # The deadline is lifted once the server has answered: a scope around the start alone
            # could not be left before those that the client opens within it.
            scope = anyio.CancelScope(deadline=anyio.current_time() + self._start_timeout_s)
            self._starting = scope
            try:
                with scope:
                    await self._converse(link, errors, scope, task_status)
            except Exception as error:
                leaf = unwrap_group(error) if isinstance(error, BaseExceptionGroup) else error
                fault = f"{type(leaf).__name__}: {leaf}"
            finally:
                self._lose(link)
            if link.client is None:
                if scope.cancelled_caught:
                    fault = f"no answer within start_timeout_s = {self._start_timeout_s:g} s"
                self._fault = fault + _read_last_lines(errors)
                self._tried.set()

    async def _converse(
        self, link: _Link, errors: Any, scope: anyio.CancelScope, task_status: TaskStatus[None]
    ) -> None:
        """Connect, and return once the link is of no more use."""
        from mcp import Client

        async with Client(self._open_transport(link, errors)) as client:
            page = await client.list_tools()
            tools = list(page.tools)
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
            self.tools, scope.deadline = tools, math.inf
            link.client, self._link, self._fault = client, link, ""
            self._starting = anyio.CancelScope()
            self._tried.set()
            task_status.started()
            async with open_task_group() as tasks:
                tasks.start_soon(self._watch, link)
                await link.ended.wait()
            # A server that is frozen may block what is sent to it at the end.
            scope.deadline = anyio.current_time() + LEAVE_S

    async def _watch(self, link: _Link) -> None:
        await link.watch(self._ping_s)
        link.ended.set()

    def _lose(self, link: _Link) -> None:
        """The link is of no more use."""
        link.ended.set()
        if self._link is link:
            self._link, self._tried = None, anyio.Event()

    async def call(self, name: str, arguments: Mapping[str, Any], *, may_repeat: bool) -> Any:
        """Call a tool of the server's; waits for a link that is being made again.

        Raises:
            ToolError: The server refused the call, or cannot be reached again; or it ended or
                froze with the call under way, and a repeat might do harm.
        """
        import mcp_types
        from mcp import MCPError

        while True:
            while self._link is None:
                await self._tried.wait()
                if self._link is None:
                    raise ToolError(
                        f"the MCP server is not there ({self._fault}), and is being started again; "
                        "not called"
                    )
            link = self._link
            link.pending += 1
            try:
                return await link.client.call_tool(name, dict(arguments))
            except MCPError as error:
                if "Server-sent event exceeded" in error.message:
                    raise ToolError(describe_long_answer(self._max_bytes)) from None
                if error.code != mcp_types.CONNECTION_CLOSED:
                    raise ToolError(str(error.message)) from None
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                pass
            except anyio.get_cancelled_exc_class():
                link.doubted.set()
                raise
            finally:
                link.pending -= 1
            self._lose(link)
            if not may_repeat:
                raise ToolError(
                    f"the MCP server {link.how} during this call, and is being started again; "
                    "whether the call took effect is unknown"
                )


def _read_last_lines(errors: Any) -> str:
    """The end of what a command wrote to its standard error."""
    end = errors.seek(0, 2)
    errors.seek(max(0, end - QUOTED_BYTES))
    return "".join(f"\n    {line.rstrip()}" for line in errors.read().splitlines()[-QUOTED_LINES:])


class _Connections:
    """Which connection a trajectory is on.

    Args:
        shared: A few for all trajectories; none where each has one of its own, made with its first
            tool and ended with its last.
        tasks: Where the tasks of those of its own run.
        make: Makes a connection that is not up yet.
    """

    def __init__(
        self,
        shared: Sequence[McpConnection],
        tasks: TaskGroup,
        make: Callable[[], McpConnection],
    ) -> None:
        self._shared, self._tasks, self._make = shared, tasks, make
        self._own: dict[int, McpConnection] = {}  # by the state that the trajectory's tools share

    async def acquire(self, context: ToolContext) -> McpConnection:
        """The connection for one tool of a trajectory; `release` it.

        Raises:
            ToolError: It cannot be made.
        """
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

    async def release(self, connection: McpConnection) -> None:
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
    _check_arguments(server, connections, per_trajectory, ping_s, max_answer_bytes)
    await anyio.to_thread.run_sync(_import_sdk)  # it takes seconds
    label = server if isinstance(server, str) else " ".join(server)

    def open_transport(link: _Link, errors: Any) -> Any:
        if isinstance(server, str):
            return open_http(server, headers, max_answer_bytes)
        return open_stdio(
            server,
            env=env,
            cwd=cwd,
            errors=errors,
            max_bytes=max_answer_bytes,
            is_frozen=lambda: link.is_frozen,
            on_end=link.ended.set,
        )

    def make() -> McpConnection:
        return McpConnection(
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


def _check_arguments(
    server: str | Sequence[str],
    connections: int,
    per_trajectory: bool,
    ping_s: float | None,
    max_answer_bytes: int,
) -> None:
    faults = []
    if not server:
        faults.append("server = []: expected a command with its arguments")
    elif isinstance(server, str) and not server.startswith(("http://", "https://")):
        expected = "expected an http or https URL, or a command as a list"
        faults.append(f"server = {server!r}: {expected}")
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

    def unused_kwargs(self, kwargs: Mapping[str, Any]) -> list[str]:
        """All: a server takes what the model gives."""
        return sorted(kwargs)

    async def open(self, context: ToolContext) -> ToolSession:
        return _McpSession(await self.connections.acquire(context), self)


class _McpSession(ToolSession):
    def __init__(self, connection: McpConnection, tool: _McpTool) -> None:
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
        mime = str(getattr(content, "mime_type", None))
        if block.type == "text" or (block.type == "resource" and hasattr(content, "text")):
            texts.append(content.text)
        elif block.type == "resource_link":
            texts.append(f"{block.name}: {block.uri}")
        elif block.type == "image" or (hasattr(content, "blob") and mime.startswith("image/")):
            data = content.data if block.type == "image" else content.blob
            images.append({"type": "image", "data": data, "mimeType": content.mime_type})
        else:
            return error_result(
                f"{name}: the server answered with {block.type} content; only text and images can "
                f"be observed"
            )
    data = answer.structured_content
    if not texts and data is not None:
        texts.append(json.dumps(data, ensure_ascii=False))
    media: dict[str, Any] = {"images": images} if images else {}
    return ToolResult("\n".join(texts), data=data, is_error=bool(answer.is_error), **media)
