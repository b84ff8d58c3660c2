"""What is used of the `mcp` SDK (extra ``mcp``), which is imported here and nowhere else."""

from __future__ import annotations

import json
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from rollout.errors import ToolError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    #: Opens a transport: the file for a command's standard error, and whether the server is frozen.

#: Seconds for a connection, and for sending a request, over HTTP.
CONNECT_S = 30.0


class McpSdk:
    """What is used of the SDK."""

    def __init__(self) -> None:
        import httpx2
        import mcp
        import mcp_types
        from mcp.client.stdio import get_default_environment
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared.message import SessionMessage

        self.http = httpx2
        self.new_client = mcp.Client
        self.error = mcp.MCPError
        self.safe_environment = get_default_environment
        self._types = mcp_types
        self._message = SessionMessage
        self._over_http = streamable_http_client

    def message(self, line: bytes) -> Any:
        """A line of a server as the client takes it: a message, or why it is none."""
        try:
            read = self._types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError as error:
            return error
        return self._message(read)

    def refusal(self, request_id: int | str, text: str) -> Any:
        """A message that answers a request with an error."""
        error = self._types.ErrorData(code=self._types.INTERNAL_ERROR, message=text)
        return self._message(self._types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error))

    def is_connection_lost(self, error: Any) -> bool:
        """Whether an error of a call says that the connection is of no more use."""
        return bool(error.code == self._types.CONNECTION_CLOSED) and not self._is_too_long(error)

    def text_of(self, error: Any, max_bytes: int) -> str:
        """What an error of a call says to the model."""
        return too_long(max_bytes) if self._is_too_long(error) else str(error.message)

    def _is_too_long(self, error: Any) -> bool:
        return "Server-sent event exceeded" in error.message

    @asynccontextmanager
    async def http_streams(
        self, url: str, headers: dict[str, str], max_bytes: int
    ) -> AsyncIterator[Any]:
        """The streams to and from a server over HTTP."""
        # A call's own deadline bounds it: a server may be silent for as long as it works.
        timeout = self.http.Timeout(CONNECT_S, read=None)
        async with (
            self.http.AsyncClient(
                headers=headers,
                timeout=timeout,
                event_hooks={"response": [bounded_bodies(self.http, max_bytes)]},
            ) as client,
            self._over_http(url, http_client=client, max_sse_event_size=max_bytes) as streams,
        ):
            yield streams


def too_long(max_bytes: int, size: str = "") -> str:
    """What is said in the place of an answer that was not read."""
    return (
        f"the MCP server's answer has more than {max_bytes:,} bytes{size}, and was not read "
        "(connect_mcp: max_answer_bytes)"
    )


def bounded_bodies(http: Any, max_bytes: int) -> Callable[[Any], Awaitable[None]]:
    """A hook for responses, of whose bodies no more is read; an error takes the place of more.

    Events of a stream have a bound of their own, and a stream of them has none.
    """

    async def bound(response: Any) -> None:
        response.stream = Bounded(response)

    class Bounded(http.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, response: Any) -> None:
            self._stream, self._request = response.stream, response.request
            self._is_events = "text/event-stream" in response.headers.get("content-type", "")
            # Compressed all the same: what becomes of it could not be bounded.
            self._is_packed = response.headers.pop("content-encoding", "identity") != "identity"

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size, pieces = 0, list[bytes]()
            async with aclosing(self._stream.__aiter__()) as stream:
                async for piece in stream:
                    if self._is_events and not self._is_packed:
                        yield piece
                        continue
                    size += len(piece)
                    if size > max_bytes or self._is_packed:
                        pieces = [self._refusal()]
                        await self.aclose()  # what reads on below ends by that
                        with suppress(Exception):
                            await anext(stream)
                        break
                    pieces.append(piece)
            yield b"".join(pieces)

        def _refusal(self) -> bytes:
            why = too_long(max_bytes)
            if self._is_packed:
                why = "the MCP server compressed its answer, which it was asked not to do"
            return json.dumps(
                {
                    "jsonrpc": "2.0",
                    "id": json.loads(self._request.content or b"{}").get("id"),
                    "error": {"code": -32603, "message": why},
                }
            ).encode()

        async def aclose(self) -> None:
            await self._stream.aclose()

    return bound


def import_sdk() -> McpSdk:
    """The SDK; importing it takes seconds.

    Raises:
        ToolError: It is not installed.
    """
    try:
        return McpSdk()
    except ImportError as error:
        raise ToolError(
            f'connect_mcp needs the MCP SDK: pip install "rollout-rl[mcp]" ({error})'
        ) from error


class HeardStream:
    """A read stream that reports each message, and when it has ended: the server is gone then."""

    def __init__(self, stream: Any, hear: Callable[[], None], end: Callable[[], None]) -> None:
        self._stream = stream
        self._hear = hear
        self._end = end

    async def receive(self) -> Any:
        try:
            message = await self._stream.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._end()
            raise
        self._hear()
        return message

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    def __aiter__(self) -> HeardStream:
        return self

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> HeardStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@attrs.frozen
class OpenStreams:
    """A transport around streams that are open already."""

    reader: Any
    writer: Any

    async def __aenter__(self) -> tuple[Any, Any]:
        return self.reader, self.writer

    async def __aexit__(self, *_: object) -> None:
        """The opener of the streams closes them."""


async def all_tools(client: Any) -> list[Any]:
    """What a server offers, page by page."""
    tools: list[Any] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools
