"""A connection to an MCP server that is kept up, and its transports. Imports the SDK, `mcp`.

An answer that is too long is refused unread. Over HTTP the transport is the SDK's. Its reader of a
command's output takes time that grows with the square of a line's length; so that one is ours.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import anyio
import httpx2
import mcp_types
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp import Client, MCPError
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.os.posix.utilities import terminate_posix_process_tree
from mcp.shared.message import SessionMessage
from pydantic_core import to_json

from rollout.errors import ToolError
from rollout.scopes import find_exception, open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from anyio.abc import ByteSendStream, Process

logger = logging.getLogger("rollout.tools")

#: Seconds before a server that ended is connected again; doubled at each failure in a row, up to …
BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
#: From closing a server's standard input to asking it to end, and from there to killing it.
LEAVE_S, END_S = 2.0, 1.0
#: Stands in the error of each answer that is too long, also in the SDK's own of an event.
_TOO_LONG = "byte limit"
#: Bytes of a command's longest line: one that writes a longer one has ended.
MAX_LINE = 64 * 2**20
#: How the SDK words that the connection is gone, and that it got a 404.
_CLOSED, _UNKNOWN_SESSION = ("Connection closed", "SSE stream"), "Session terminated"
#: What reading and writing raise once the other side is gone, or ours is closed.
_GONE = OSError, anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.IncompleteRead
#: The id of a message, within `_ENDS` bytes of one of its ends: servers write it first or last.
_ENDS = 4096
_ID = re.compile(
    rb'\A\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+|"[^"\\]*")\s*,'
    rb'|"id"\s*:\s*(\d+|"[^"\\]*")\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z'
)


def _is_over(error: MCPError) -> bool:
    """Whether the connection has ended, or a server that was started anew knows no session."""
    if error.code == mcp_types.CONNECTION_CLOSED:  # servers may give their own errors this code
        return error.message.startswith(_CLOSED) and _TOO_LONG not in error.message
    return error.code == mcp_types.INVALID_REQUEST and error.message == _UNKNOWN_SESSION


@asynccontextmanager
async def keep_up(connections: Sequence[Connection]) -> AsyncIterator[Sequence[Connection]]:
    """Keep up connections, also where their server is lost, until the block ends; see `keep`."""
    async with open_task_group() as tasks:
        for connection in connections:
            tasks.start_soon(connection.keep)
        for connection in connections:
            await connection.tried.wait()
        yield connections


class Connection:
    """A connection to a server; see `keep_up`.

    `open_transport` is called with a file for a command's standard error, and with what to call
    when its output ends.

    Attributes:
        tools: What the server offered when it was last connected.
        tried: Set where there is a client, or connecting again has failed.
    """

    def __init__(
        self,
        label: str,
        open_transport: Callable[[Any, Callable[[], None]], Any],
        start_timeout_s: float,
        ping_s: float | None,
    ) -> None:
        self._label, self._open_transport = label, open_transport
        self._start_timeout_s, self._ping_s = start_timeout_s, ping_s or math.inf
        self.tools: list[mcp_types.Tool] = []
        self._client: Client | None = None  # while the server can be called
        self._fault = ""  # what became of the server
        self.tried, self._ended = anyio.Event(), anyio.Event()

    async def keep(self) -> None:
        """Connect, and again when the server is lost, until cancelled.

        A `ToolError` where the first connection fails; later failures are logged.
        """
        backoff_s = 0.0
        while True:
            if await self._serve():
                backoff_s = BACKOFF_S
            elif not backoff_s:
                raise ToolError(f"MCP server {self._label!r}: {self._fault}")
            else:
                self.tried.set()
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            logger.warning("MCP server %r: %s; connecting again", self._label, self._fault)
            await anyio.sleep(backoff_s)

    async def _serve(self) -> bool:
        """Connect, and stay until the server is lost; False where it could not be reached."""
        self._ended, client = anyio.Event(), None
        with tempfile.TemporaryFile(buffering=0) as errors:
            try:
                # The deadline is lifted once the server has answered: a scope around the start
                # alone could not be left before those that the client opens within it.
                with anyio.move_on_after(self._start_timeout_s) as scope:
                    async with Client(self._open_transport(errors, self._ended.set)) as starting:
                        page = await starting.list_tools()
                        self.tools = list(page.tools)
                        while page.next_cursor:
                            page = await starting.list_tools(cursor=page.next_cursor)
                            self.tools += page.tools
                        client = self._client = starting
                        self._fault, scope.deadline = "ended", math.inf
                        self.tried.set()
                        await self._wait_for_end(client, errors)
                        scope.cancel()  # a frozen server may block a farewell
                fault = f"no answer within start_timeout_s = {self._start_timeout_s:g} s"
            except Exception as error:
                leaf = find_exception(error, Exception) or error
                fault = f"{type(leaf).__name__}: {leaf}"
            finally:
                self._lose(client)
            if client is None:
                errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2**14))  # there may be much more
                lines = errors.read().decode(errors="replace").splitlines()[-10:]
                self._fault = "\n    ".join([fault, *map(str.rstrip, lines)])
        return client is not None

    async def _wait_for_end(self, client: Client, errors: BinaryIO) -> None:
        """Return once the server has ended, or answers no ping."""
        while True:
            errors.seek(0)  # the server's too; what a server says that can be called is not read
            errors.truncate()
            with anyio.move_on_after(self._ping_s):
                await self._ended.wait()
                return
            with anyio.move_on_after(self._ping_s) as scope:
                try:
                    await client.session.send_ping()
                except MCPError as error:  # an answer as well: newer servers know no ping
                    if _is_over(error):
                        return
            if scope.cancelled_caught:
                self._fault = f"was silent for {self._ping_s:g} s, even to a ping"
                return

    def _lose(self, client: Client | None) -> None:
        """A client is of no more use."""
        if client is not None and client is self._client:
            self._client, self.tried = None, anyio.Event()
            self._ended.set()

    async def call(self, name: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool of the server's; waits for a connection that is being made again."""
        await self.tried.wait()
        if (client := self._client) is None:
            fault = f"is not there ({self._fault}), and is being started again"
            raise ToolError(f"the MCP server {fault}; not called")
        try:  # what cannot be written would end the transport, which others use as well
            to_json(arguments)
        except ValueError as error:
            raise ToolError(f"arguments: {error}; expected JSON") from None
        try:
            return await client.call_tool(name, arguments)
        except MCPError as error:
            if not _is_over(error):
                raise ToolError(error.message) from None
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            pass
        fault = f"{self._fault} during this call, and is being started again"
        self._lose(client)
        raise ToolError(f"the MCP server {fault}; whether the call took effect is unknown")


def _make_refusal(request_id: Any, max_bytes: int) -> bytes:
    """What takes the place of an answer that is too long."""
    text = f"the answer exceeded the {max_bytes} {_TOO_LONG} (connect_mcp: max_answer_bytes)"
    error = {"code": mcp_types.INTERNAL_ERROR, "message": text}
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}).encode()


def bound_line(line: bytes, max_bytes: int) -> bytes:
    """A line of a command's; in the place of a longer answer, or of any other message, an error."""
    if len(line) <= max_bytes:
        return line
    found = _ID.search(line[:_ENDS] + line[-_ENDS:])
    return b"" if found is None else _make_refusal(json.loads(found[1] or found[2]), max_bytes)


@asynccontextmanager
async def open_stdio(
    command: Sequence[str],
    max_bytes: int,
    errors: Any,
    on_end: Callable[[], None],
    *,
    env: Mapping[str, str] | None,
    cwd: str | None,
) -> AsyncIterator[tuple[Any, Any]]:
    """The streams to and from a server in a process of its own; the block's end is its end.

    Its standard error goes to the file `errors`; `on_end` is called once its output has ended.
    """
    env = {**get_default_environment(), **(env or {})}
    process = await anyio.open_process(
        list(command), env=env, stderr=errors, cwd=cwd, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None  # noqa: PT018
    stdin, stdout = process.stdin, process.stdout
    to_client, received = anyio.create_memory_object_stream[Any](0)
    to_send, from_client = anyio.create_memory_object_stream[Any](0)

    async def read() -> None:
        buffered, most = BufferedByteReceiveStream(stdout), max(MAX_LINE, max_bytes)
        with to_client, suppress(*_GONE, anyio.DelimiterNotFound):
            while True:
                line = bound_line(await buffered.receive_until(b"\n", most), max_bytes)
                try:
                    found = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError as error:
                    if line.strip():
                        await to_client.send(error)
                else:
                    await to_client.send(SessionMessage(found))
        on_end()

    async def write() -> None:
        with from_client, suppress(*_GONE):
            async for message in from_client:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await stdin.send(text.encode() + b"\n")

    async with anyio.create_task_group() as tasks, received, to_send:
        tasks.start_soon(read)
        tasks.start_soon(write)
        try:
            yield received, to_send
        finally:
            await _end(process, stdin)
            tasks.cancel_scope.cancel()


async def _end(process: Process, stdin: ByteSendStream) -> None:
    """End the server and what it has started; shielded and bounded."""
    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(LEAVE_S), suppress(*_GONE):
            await stdin.aclose()
            await process.wait()
        await terminate_posix_process_tree(process, END_S)
        with anyio.move_on_after(END_S):
            await process.aclose()


@asynccontextmanager
async def open_http(
    url: str, max_bytes: int, *_: Any, headers: Mapping[str, str] | None
) -> AsyncIterator[tuple[Any, Any]]:
    """The streams to and from a server over HTTP; a call's own deadline bounds its answer."""

    async def bound(response: httpx2.Response) -> None:
        # A compressed body, which nobody asked for, is not unpacked: its size could not be bounded.
        response.headers.pop("content-encoding", None)
        if "text/event-stream" in response.headers.get("content-type", ""):
            return  # whose reader bounds each event
        body, size, stream = bytearray(), 0, cast("httpx2.AsyncByteStream", response.stream)
        async with aclosing(stream):
            async for piece in stream:
                size += len(piece)
                body += piece[: max_bytes - len(body)]
        if size > max_bytes:
            body[:] = _make_refusal(json.loads(response.request.content).get("id"), max_bytes)
        response.stream = httpx2.ByteStream(bytes(body))

    async with (
        httpx2.AsyncClient(
            headers={"Accept-Encoding": "identity", **(headers or {})},
            timeout=httpx2.Timeout(30.0, read=None),  # to connect, and to send a request
            event_hooks={"response": [bound]},
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=max_bytes) as streams,
    ):
        yield streams
