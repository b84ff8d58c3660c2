"""An HTTP server of fifty lines that answers with what real ones were recorded to say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

Answer = Callable[[dict[str, Any], Callable[[str], Awaitable[None]]], Awaitable[None]]
HEAD = "HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"


class RecordedServer:
    """Answers by method and path; made by `recorded_server`.

    Attributes:
        url: Where it listens.
        bodies: What was posted, as (path, JSON), in the order of arrival.
        closed: Paths of streams whose client went away before their end.
    """

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.closed: list[str] = []
        self._routes: dict[str, Answer] = {}

    def on(self, route: str, text: str, status: int = 200) -> None:
        """Answer e.g. ``GET /server_info`` with `text`."""

        async def answer(_: dict[str, Any], send: Callable[[str], Awaitable[None]]) -> None:
            await send(HEAD.format(status=status, kind="application/json") + text)

        self._routes[route] = answer

    def on_stream(self, route: str, stream: Answer) -> None:
        """Answer with the events that `stream(body, send)` sends."""

        async def answer(body: dict[str, Any], send: Callable[[str], Awaitable[None]]) -> None:
            await send(HEAD.format(status=200, kind="text/event-stream"))
            await stream(body, send)

        self._routes[route] = answer

    async def serve(self, connection: SocketStream) -> None:
        """One request of one connection."""
        async with connection:
            incoming = BufferedByteReceiveStream(connection)
            try:
                head = (await incoming.receive_until(b"\r\n\r\n", 65536)).decode()
            except anyio.IncompleteRead:  # a client that is closed before it asks
                return
            method, path, _ = head.split(" ", 2)
            lengths = [h for h in head.lower().split("\r\n") if h.startswith("content-length:")]
            size = int(lengths[0].split(":")[1]) if lengths else 0
            body = json.loads(await incoming.receive_exactly(size)) if size else {}
            if method == "POST":
                self.bodies.append((path, body))

            async def send(text: str) -> None:
                await connection.send(text.encode())

            try:
                route = self._routes.get(f"{method} {path}")
                if route is None:
                    await send(HEAD.format(status=404, kind="text/plain") + "no such route")
                else:
                    await route(body, send)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self.closed.append(path)


@asynccontextmanager
async def recorded_server() -> AsyncIterator[RecordedServer]:
    """A server on a free port of this machine."""
    server = RecordedServer()
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    server.url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, server.serve)
        yield server
        tasks.cancel_scope.cancel()
