"""What is used of the `mcp` SDK (extra ``mcp``), which is imported here and nowhere else."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TextIO

import anyio
import attrs

from rollout.errors import ToolError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    NewTransport = Callable[[TextIO], AbstractAsyncContextManager[Any]]

#: Seconds for a connection, and for sending a request, over HTTP.
CONNECT_S = 30.0


class McpSdk:
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


class EndingStream:
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

    def __aiter__(self) -> EndingStream:
        return self

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> EndingStream:
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
        """Whoever opened the streams closes them."""


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
