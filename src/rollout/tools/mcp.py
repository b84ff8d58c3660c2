"""Tools of any MCP server, offered as ours.

This is the one module that imports the `mcp` SDK (extra ``mcp``), and it does so when a server is
connected. A server is shared by all trajectories over a few connections; each lives in a task of
its own, which starts it again when it ends. A trajectory stays on one connection while that lasts,
because servers keep state.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

import anyio
import attrs

from rollout.errors import ToolError
from rollout.scopes import leaf_of, open_task_group
from rollout.tools.results import ToolResult, error_result
from rollout.tools.tool import Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from anyio.abc import TaskStatus

    from rollout.types import ToolCall

    NewTransport = Callable[[TextIO], AbstractAsyncContextManager[Any]]

logger = logging.getLogger("rollout.tools")

#: Seconds before a server that ended is started again; doubled at each failure in a row, up to …
RESTART_BACKOFF_S = 0.5
MAX_RESTART_BACKOFF_S = 30.0
#: Seconds for a connection, and for sending a request, over HTTP.
CONNECT_S = 30.0
#: Lines of a command's standard error that an error text quotes.
KEPT_LINES = 10


@asynccontextmanager
async def connect_mcp(
    server: str | Sequence[str],
    *,
    tools: Sequence[str] | None = None,
    prefix: str = "",
    connections: int = 1,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    headers: Mapping[str, str] | None = None,
    start_timeout_s: float = 30.0,
) -> AsyncIterator[list[Tool]]:
    """The tools of an MCP server, for `open_rollout`; the server is let go at the block's end.

    Args:
        server: A URL (streamable HTTP), or a command with its arguments, which is run and spoken
            with over its standard input and output.
        tools: Names of those wanted, as the server calls them; None takes all.
        prefix: Put before each name, where servers have tools of equal names.
        connections: For a command, processes; trajectories are spread over them.
        env, cwd: Of the command: variables added to a small safe set, and its directory.
        headers: Sent with each HTTP request.
        start_timeout_s: From starting a connection to its list of tools.

    Raises:
        ToolError: The extra is missing, the server does not answer in time, or lacks a tool.
    """
    if connections < 1:
        raise ToolError(f"connect_mcp: connections = {connections}: expected at least 1")
    label = server if isinstance(server, str) else " ".join(server)
    _check(server)
    sdk = await anyio.to_thread.run_sync(_import_sdk)  # it takes seconds
    new_transport = sdk.transport(server, env=env, cwd=cwd, headers=headers)
    links = [_Link(label, sdk, new_transport, start_timeout_s) for _ in range(connections)]
    async with open_task_group() as tasks:
        async with open_task_group() as starting:
            handles = [starting.start_soon(tasks.start, link.keep) for link in links]
            for handle in handles:
                await handle.wait()
        yield [_tool(links, tool, prefix) for tool in _wanted(label, links[0].tools, tools)]


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


class _Sdk:
    """What is used of the SDK."""

    def __init__(self) -> None:
        import httpx2
        import mcp
        import mcp_types
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        self.http = httpx2
        self.new_client = mcp.Client
        self.error = mcp.MCPError
        self.connection_closed = mcp_types.CONNECTION_CLOSED
        self._stdio = stdio_client
        self._parameters = StdioServerParameters
        self._over_http = streamable_http_client

    def transport(
        self,
        server: str | Sequence[str],
        *,
        env: Mapping[str, str] | None,
        cwd: str | None,
        headers: Mapping[str, str] | None,
    ) -> NewTransport:
        """Makes a transport for each connection; a command's standard error goes to the file."""
        if isinstance(server, str):
            return lambda _: self._http_streams(server, dict(headers or {}))
        command, *arguments = server
        parameters = self._parameters(
            command=command, args=arguments, env=dict(env or {}) or None, cwd=cwd
        )
        return lambda errors: self._stdio(parameters, errlog=errors)

    @asynccontextmanager
    async def _http_streams(self, url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
        # A call's own deadline bounds it: a server may be silent for as long as it works.
        timeout = self.http.Timeout(CONNECT_S, read=None)
        async with (
            self.http.AsyncClient(headers=headers, timeout=timeout) as client,
            self._over_http(url, http_client=client) as streams,
        ):
            yield streams


def _import_sdk() -> _Sdk:
    try:
        return _Sdk()
    except ImportError as error:
        raise ToolError(
            f'connect_mcp needs the MCP SDK: pip install "rollout[mcp]" ({error})'
        ) from error


class _Ending:
    """A read stream that says when it has ended: the server is gone then."""

    def __init__(self, stream: Any, ended: anyio.Event) -> None:
        self._stream = stream
        self._ended = ended

    async def receive(self) -> Any:
        try:
            return await self._stream.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._ended.set()
            raise

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    def __aiter__(self) -> _Ending:
        return self

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> _Ending:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Link:
    """One connection, kept up by a task of its own.

    Attributes:
        tools: What the server offered when it was last connected.
        users: Sessions of tools that are on it.
    """

    def __init__(
        self, label: str, sdk: _Sdk, new_transport: NewTransport, start_timeout_s: float
    ) -> None:
        self.tools: list[Any] = []
        self.users = 0
        self._label = label
        self._sdk = sdk
        self._new_transport = new_transport
        self._start_timeout_s = start_timeout_s
        self._client: Any = None
        self._up = anyio.Event()
        self._ended = anyio.Event()

    async def keep(self, *, task_status: TaskStatus[None]) -> None:
        """Connect, and connect again when the server ends.

        Raises:
            ToolError: The first connection failed; later failures are logged, and tried again.
        """
        fault = await self._serve(task_status)
        if fault:
            raise ToolError(f"MCP server {self._label!r}: {fault}")
        backoff_s = RESTART_BACKOFF_S
        while True:
            logger.warning("MCP server %r: %s; connecting again", self._label, fault or "it ended")
            await anyio.sleep(backoff_s)
            fault = await self._serve(anyio.TASK_STATUS_IGNORED)
            backoff_s = min(2 * backoff_s, MAX_RESTART_BACKOFF_S) if fault else RESTART_BACKOFF_S

    async def _serve(self, task_status: TaskStatus[None]) -> str:
        """One connection from its start to its end; why it did not come up, if so."""
        ended = anyio.Event()
        # The deadline is lifted once the server has answered: a scope around the start alone could
        # not be left before those that the client opens within it.
        start = anyio.CancelScope(deadline=anyio.current_time() + self._start_timeout_s)
        was_up, fault = False, "it ended while starting"
        with tempfile.TemporaryFile("w+", errors="replace") as file:
            errors = cast("TextIO", file)
            try:
                with start:
                    async with self._new_transport(errors) as (reader, writer):
                        streams = _Streams(_Ending(reader, ended), writer)
                        async with self._sdk.new_client(streams) as client:
                            self.tools = await _all_tools(client)
                            start.deadline, was_up = math.inf, True
                            self._go_up(client, ended)
                            task_status.started()
                            await ended.wait()
            except Exception as error:
                leaf = leaf_of(error) if isinstance(error, BaseExceptionGroup) else error
                fault = f"{type(leaf).__name__}: {leaf}"
            finally:
                self._go_down(ended)
            if was_up:
                return ""
            if start.cancelled_caught:
                fault = f"no answer within start_timeout_s = {self._start_timeout_s:g} s"
            return fault + _last_words(errors)

    def _go_up(self, client: Any, ended: anyio.Event) -> None:
        self._client, self._ended = client, ended
        self._up.set()

    def _go_down(self, ended: anyio.Event) -> None:
        """The connection that this event belongs to is of no more use."""
        ended.set()
        if ended is self._ended and self._client is not None:
            self._client, self._up = None, anyio.Event()

    async def call(self, name: str, arguments: Mapping[str, Any], *, may_repeat: bool) -> Any:
        """The server's answer; waits for a connection that is being made again.

        Raises:
            ToolError: The server refused the call; or it ended with the call under way, and a
                repeat might do harm.
        """
        while True:
            await self._up.wait()
            client, ended = self._client, self._ended
            try:
                return await client.call_tool(name, dict(arguments))
            except self._sdk.error as error:
                if error.code != self._sdk.connection_closed:
                    raise ToolError(error.message) from None
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                pass
            self._go_down(ended)
            if not may_repeat:
                raise ToolError(
                    "the MCP server ended during this call, and is being started again; whether "
                    "the call took effect is unknown"
                )


def _last_words(errors: TextIO) -> str:
    """The end of what a command wrote to its standard error."""
    errors.seek(0)
    lines = deque(errors, maxlen=KEPT_LINES)
    return "".join(f"\n    {line.rstrip()}" for line in lines)


@attrs.frozen
class _Streams:
    """A transport around streams that are open already."""

    reader: Any
    writer: Any

    async def __aenter__(self) -> tuple[Any, Any]:
        return self.reader, self.writer

    async def __aexit__(self, *_: object) -> None:
        """Whoever opened the streams closes them."""


async def _all_tools(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools


def _tool(links: Sequence[_Link], theirs: Any, prefix: str) -> Tool:
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

    links: Sequence[_Link]
    their_name: str
    may_repeat: bool

    async def open(self, context: ToolContext) -> ToolSession:
        link = min(self.links, key=lambda link: link.users)
        link.users += 1
        return _McpSession(link, self)


class _McpSession(ToolSession):
    def __init__(self, link: _Link, tool: _McpTool) -> None:
        self._link = link
        self._tool = tool

    async def execute(self, call: ToolCall) -> ToolResult:
        tool = self._tool
        answer = await self._link.call(tool.their_name, call.arguments, may_repeat=tool.may_repeat)
        return answer if isinstance(answer, ToolResult) else _result(tool.name, answer)

    async def close(self) -> None:
        self._link.users -= 1


def _result(name: str, answer: Any) -> ToolResult:
    """The observation for a server's answer; media are refused until transcripts can hold them."""
    texts = []
    for block in answer.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "resource" and hasattr(block.resource, "text"):
            texts.append(block.resource.text)
        elif block.type == "resource_link":
            texts.append(f"{block.name}: {block.uri}")
        else:
            return error_result(
                f"{name}: the server answered with {block.type} content; only text can be observed"
            )
    data = answer.structured_content
    if not texts and data is not None:
        texts.append(json.dumps(data, ensure_ascii=False))
    return ToolResult("\n".join(texts), data=data, is_error=bool(answer.is_error))
