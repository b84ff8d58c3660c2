"""Transports to MCP servers for the `mcp` SDK, of which no message is kept that is too long.

Over HTTP it is the SDK's, whose bodies are bounded. The SDK's reader of a command's output has no
bound, and takes time that grows with the square of a line's length; so that one is ours.
"""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from anyio.abc import ByteSendStream, Process

#: From closing a server's standard input to asking it to end, and from there to killing it.
LEAVE_S, END_S = 2.0, 1.0
#: Seconds for a connection, and for sending a request, over HTTP.
CONNECT_S = 30.0
#: Stands in the error of each answer that is too long, also in the SDK's own of an event.
TOO_LONG = "byte limit"
#: What reading and writing raise once the other side is gone, or ours is closed.
_GONE = (OSError, anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError)
#: Bytes of each end of a line that is too long, in one of which its id stands.
_ENDS = 4096
#: The id of a message: some servers write it first, others last.
_ID = re.compile(
    rb'\A\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+|"[^"\\]*")\s*,'
    rb'|"id"\s*:\s*(\d+|"[^"\\]*")\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z'
)


def _describe_limit(max_bytes: int) -> str:
    return f"the answer exceeded the {max_bytes} {TOO_LONG} (connect_mcp: max_answer_bytes)"


class LineBuffer:
    """Cuts a server's output into lines; of one that is too long it keeps the ends.

    An error takes the place of a long answer; a long line that answers no request is left out.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._head, self._tail, self._size = bytearray(), b"", 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that end within `data`, but for blank ones."""
        for number, piece in enumerate(data.split(b"\n")):
            if number and (line := self._end_line()).strip():
                yield line
            self._head += piece[: max(0, self._max_bytes - len(self._head))]
            self._tail = (self._tail + piece)[-_ENDS:]
            self._size += len(piece)

    def _end_line(self) -> bytes:
        line, tail, size = bytes(self._head), self._tail, self._size
        self._head, self._tail, self._size = bytearray(), b"", 0
        if size <= self._max_bytes:
            return line
        if (found := _ID.search(line[:_ENDS] + tail)) is None:
            return b""
        error = {"code": -32603, "message": _describe_limit(self._max_bytes)}
        answer = {"jsonrpc": "2.0", "id": json.loads(found[1] or found[2]), "error": error}
        return json.dumps(answer).encode()


@asynccontextmanager
async def open_stdio(
    command: Sequence[str],
    errors: Any,
    on_end: Callable[[], None],
    *,
    env: Mapping[str, str] | None,
    cwd: str | None,
    max_bytes: int,
) -> AsyncIterator[tuple[Any, Any]]:
    """The streams to and from a server that runs in a process of its own.

    When the block ends the server is asked to end, and then killed with what it has started.

    Args:
        command: With its arguments.
        errors: The file for its standard error.
        on_end: Called once the server's output has ended.
        env, cwd: See `connect_mcp`.
        max_bytes: Longest message that is kept; an error takes the place of a longer answer.
    """
    import mcp_types
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage

    validate = mcp_types.jsonrpc_message_adapter.validate_json
    env = {**get_default_environment(), **(env or {})}
    process = await anyio.open_process(
        list(command), env=env, stderr=errors, cwd=cwd, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None  # noqa: PT018
    stdin, stdout = process.stdin, process.stdout
    to_client, received = anyio.create_memory_object_stream[Any](0)
    to_send, from_client = anyio.create_memory_object_stream[Any](0)

    async def read() -> None:
        lines = LineBuffer(max_bytes)
        with to_client, suppress(*_GONE):
            async for data in stdout:
                for line in lines.feed(data):
                    try:
                        message: Any = SessionMessage(validate(line, by_name=False))
                    except ValueError as error:
                        message = error
                    await to_client.send(message)
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
    from mcp.os.posix.utilities import terminate_posix_process_tree

    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(LEAVE_S), suppress(*_GONE):
            await stdin.aclose()
            await process.wait()
        await terminate_posix_process_tree(process, END_S)
        with anyio.move_on_after(END_S):
            await process.aclose()


@asynccontextmanager
async def open_http(
    url: str, headers: Mapping[str, str] | None, max_bytes: int
) -> AsyncIterator[tuple[Any, Any]]:
    """The streams to and from a server over HTTP; a call's own deadline bounds its answer."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    class BoundedBody(httpx2.AsyncByteStream):
        """Of a body that is too long the rest is dropped as it is read; its end is an error."""

        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for piece in self._stream:
                size += len(piece)
                if size <= max_bytes:
                    yield piece
            if size > max_bytes:
                raise httpx2.StreamError(_describe_limit(max_bytes))

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: Any) -> None:
        # A compressed body, which nobody asked for, is not unpacked: its size could not be bounded.
        response.headers.pop("content-encoding", None)
        if "text/event-stream" not in response.headers.get("content-type", ""):
            response.stream = BoundedBody(response.stream)

    async with (
        httpx2.AsyncClient(
            headers={"Accept-Encoding": "identity", **(headers or {})},
            timeout=httpx2.Timeout(CONNECT_S, read=None),
            event_hooks={"response": [bound]},
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=max_bytes) as streams,
    ):
        yield streams
