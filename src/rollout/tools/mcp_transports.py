"""Transports to MCP servers for the `mcp` SDK, of which no message is read that is too long.

Over HTTP it is the SDK's, whose bodies are bounded. The SDK's reader of a command's output has no
bound, and takes time that grows with the square of a line's length; so that one is ours.
"""

from __future__ import annotations

import json
import re
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from rollout.limits import cleanup_scope

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Mapping,
        Sequence,
    )

    from anyio.abc import Process
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

#: From closing a server's standard input to asking it to end, and from there to killing it.
LEAVE_S, END_S = 2.0, 1.0
#: Seconds for a connection, and for sending a request, over HTTP.
CONNECT_S = 30.0
#: What reading and writing raise once the other side is gone, or ours is closed.
_GONE = (
    *(anyio.EndOfStream, anyio.IncompleteRead, OSError),
    *(anyio.ClosedResourceError, anyio.BrokenResourceError),
)
#: Bytes of each end of a line that is too long, in one of which its id stands.
_ENDS = 4096
#: The id of a message: some servers write it first, others last.
_ID = re.compile(
    rb'\A\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+|"[^"\\]*")\s*,'
    rb'|"id"\s*:\s*(\d+|"[^"\\]*")\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z'
)


def describe_long_answer(max_bytes: int) -> str:
    """What an error says in place of an answer that was not read."""
    return (
        f"the MCP server's answer has more than {max_bytes:,} bytes, and was not read "
        "(connect_mcp: max_answer_bytes)"
    )


def write_refusal(request_id: Any, text: str) -> bytes:
    """A message that answers a request with an error."""
    error = {"code": -32603, "message": text}
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}).encode()


async def read_lines(source: Any, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The lines of a byte stream, until it ends; a refusal in place of a long answer.

    A line of more than `max_bytes` that answers no request is left out.
    """
    stream = BufferedByteReceiveStream(source)
    with suppress(*_GONE):
        while True:
            try:
                line = await stream.receive_until(b"\n", max_bytes + 1)
                ends = line if len(line) > max_bytes else b""
            except anyio.DelimiterNotFound:
                line, ends = b"", await _skip_line(stream)
            if ends:
                line, request_id = b"", _ID.search(ends)
                if request_id is not None:
                    text = describe_long_answer(max_bytes)
                    line = write_refusal(json.loads(request_id[1] or request_id[2]), text)
            if line.strip():
                yield line


async def _skip_line(stream: BufferedByteReceiveStream) -> bytes:
    """Read a line of which only the ends are kept."""
    line, tail, newline = bytearray(), b"", b""
    while not newline:
        piece, newline, rest = (await stream.receive(2**30)).partition(b"\n")
        line += piece[: max(0, _ENDS - len(line))]
        tail = (tail + piece)[-_ENDS:]
    stream.feed_data(rest)
    return bytes(line) + tail


@asynccontextmanager
async def open_stdio(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: str | None,
    errors: Any,
    max_bytes: int,
    on_end: Callable[[], None],
) -> AsyncIterator[tuple[Any, Any]]:
    """The streams to and from a server that runs in a process of its own.

    When the block ends the server is asked to end, and then killed with what it has started.

    Args:
        command: With its arguments.
        env, cwd: See `connect_mcp`.
        errors: The file for its standard error.
        max_bytes: Longest message that is read; an error takes the place of a longer answer.
        on_end: Called once the server's output has ended.
    """
    from mcp.client.stdio import get_default_environment

    process = await anyio.open_process(
        list(command),
        env={**get_default_environment(), **(env or {})},
        stderr=errors,
        cwd=cwd,
        start_new_session=True,
    )
    received, to_client = anyio.create_memory_object_stream[Any](0)
    from_client, to_send = anyio.create_memory_object_stream[Any](0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, process, received, max_bytes, on_end)
        tasks.start_soon(_write, process, to_send, received)
        try:
            yield to_client, from_client
        finally:
            with anyio.CancelScope(shield=True):
                from_client.close()
                await _end(process)
                to_client.close()
            tasks.cancel_scope.cancel()


async def _read(
    process: Process,
    received: MemoryObjectSendStream[Any],
    max_bytes: int,
    on_end: Callable[[], None],
) -> None:
    """Hand the server's messages on; once nobody takes them, drain its output: it may not block."""
    import mcp_types
    from mcp.shared.message import SessionMessage

    validate = mcp_types.jsonrpc_message_adapter.validate_json
    async with aclosing(read_lines(process.stdout, max_bytes)) as lines:
        with received:
            async for line in lines:
                message: Any
                try:
                    message = SessionMessage(validate(line, by_name=False))
                except ValueError as error:
                    message = error
                with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                    await received.send(message)
    on_end()


async def _write(
    process: Process, to_send: MemoryObjectReceiveStream[Any], received: MemoryObjectSendStream[Any]
) -> None:
    assert process.stdin is not None
    try:
        async with to_send:
            async for message in to_send:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await process.stdin.send(text.encode() + b"\n")
    except _GONE:
        received.close()  # the client must not wait for answers


async def _end(process: Process) -> None:
    """End the server and what it has started; bounded."""
    from mcp.os.posix.utilities import terminate_posix_process_tree

    assert process.stdin is not None
    with cleanup_scope(LEAVE_S), suppress(*_GONE):
        await process.stdin.aclose()
        await process.wait()
    await terminate_posix_process_tree(process, END_S)
    with cleanup_scope(END_S):
        await process.aclose()


@asynccontextmanager
async def open_http(
    url: str, headers: Mapping[str, str] | None, max_bytes: int
) -> AsyncIterator[tuple[Any, Any]]:
    """The streams to and from a server over HTTP; a call's own deadline bounds its answer."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    async with (
        httpx2.AsyncClient(
            headers={"Accept-Encoding": "identity", **(headers or {})},
            timeout=httpx2.Timeout(CONNECT_S, read=None),
            event_hooks={"response": [bound_bodies(max_bytes)]},
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=max_bytes) as streams,
    ):
        yield streams


def bound_bodies(max_bytes: int) -> Callable[[Any], Awaitable[None]]:
    """A hook for responses: an error takes the place of a body that is too long, or compressed.

    What becomes of a compressed one could not be bounded. Streams of events are the SDK's to bound.
    """
    import httpx2

    async def bound(response: Any) -> None:
        is_packed = response.headers.pop("content-encoding", "identity") != "identity"
        if not is_packed and "text/event-stream" in response.headers.get("content-type", ""):
            return
        body, stream = bytearray(), response.stream
        async with aclosing(stream.__aiter__()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) <= max_bytes and not is_packed:
                    continue
                text = describe_long_answer(max_bytes)
                if is_packed:
                    text = "the MCP server compressed its answer, which it was asked not to do"
                request = json.loads(response.request.content or b"{}")
                body[:] = write_refusal(request.get("id"), text)
                await stream.aclose()  # what reads on below ends by that
                with suppress(Exception):
                    await anext(pieces)
                break
        response.stream = httpx2.ByteStream(bytes(body))

    return bound
