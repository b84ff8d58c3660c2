"""HTTP/1.1: connections, requests and replies, within bounds.

A task serves each connection; `h11` is the protocol. While it waits for an answer it reads from
its connection, and so learns that the client leaves. Whatever reads or writes raises
`ClientLeftError` once it is gone, or takes nothing for `gateway.write_s`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import anyio

try:
    import h11
except ModuleNotFoundError:  # `serve_http` refuses to serve
    h11 = None  # type: ignore[assignment]

from rollout.bridge import loop_poster
from rollout.errors import ConfigError
from rollout.gateway.apis.writing import encode
from rollout.gateway.calls import GatewayError
from rollout.scopes import open_task_group
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from concurrent.futures import Future

    from anyio.abc import SocketStream

    from rollout.config import GatewayConfig

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]

logger = logging.getLogger("rollout.gateway")

JSON: Headers = [(b"content-type", b"application/json")]
EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
#: Official clients obey it, whatever the status.
FINAL: Headers = [(b"x-should-retry", b"false")]
#: A request's line and headers together; and what a client may send ahead of its answer.
MAX_HEAD_BYTES = 64 * 1024
#: For what of a refused request's body is still on its way, and for handlers when the server ends.
DRAIN_S = 5.0
#: How long a reply may turn out to be unread; later a connection breaks for other reasons.
UNREAD_S = 5.0
#: Connections that the system holds until they are accepted.
BACKLOG = 4096


class ClientLeftError(Exception):
    """The client is gone; there is nobody to answer."""


class Exchange:
    """One request and its reply.

    Attributes:
        method, path: Of the request; the path is decoded, and without a query.
        headers: By their names in lower case.
        parameters: Of the path; its route sets them.
        has_begun: Whether a part of the reply is sent.
    """

    def __init__(self, connection: _Connection, head: h11.Request, config: GatewayConfig) -> None:
        self.method = head.method.decode()
        self.path = unquote(head.target.decode("latin-1").partition("?")[0])
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers
        }
        self.parameters: Mapping[str, str] = {}
        self.has_begun = False
        self._connection = connection
        self._config = config

    @property
    def key(self) -> str:
        """What the client shows to be let in; "" where it shows nothing."""
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token.strip():
            return token.strip()
        return self.headers.get("x-api-key", "")

    async def read_body(self) -> bytes:
        """The body."""
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            message = f"content-encoding {encoding!r}: not served; expected none"
            raise GatewayError(400, "invalid_request", message)
        most = self._config.max_body_bytes
        declared = self.headers.get("content-length", "")
        too_long = GatewayError(
            413, "too_large", f"the body is longer than gateway.max_body_bytes = {most}"
        )
        if declared.isdecimal() and int(declared) > most:
            raise too_long
        body = bytearray()
        with anyio.move_on_after(self._config.body_s):
            while (data := await self._connection.read_data()) is not None:
                body += data
                if len(body) > most:
                    raise too_long
            return bytes(body)
        limit = f"gateway.body_s = {self._config.body_s:g}"
        raise GatewayError(400, "invalid_request", f"the body took longer than {limit}")

    async def wait(self, future: Future[T], sign: bytes = b"", headers: Headers = JSON) -> T:
        """The result of what another loop computes, unless the client leaves before.

        Meanwhile it sends `sign`, where there is one, every `gateway.keep_alive_s`.
        """
        every_s = self._config.keep_alive_s if sign else math.inf
        post, scope = loop_poster(), anyio.CancelScope()

        def wake() -> None:
            scope.cancel()

        future.add_done_callback(lambda _: post(wake))
        while not future.done():
            scope = anyio.CancelScope(deadline=anyio.current_time() + every_s)
            with scope:
                await self._connection.watch_client()
            if not future.done():
                await self.write(sign, headers)
        return future.result()

    async def write(self, data: bytes, headers: Headers) -> None:
        """Send a part of the reply, the first one behind its head; `reply` sends the rest."""
        head = [] if self.has_begun else [_make_head(200, headers)]
        self.has_begun = True
        await self._connection.send(*head, h11.Data(data=data))

    async def reply(self, data: bytes, headers: Headers = JSON, status: int = 200) -> None:
        """Send the reply in one piece; its last part where it has begun."""
        length = (b"content-length", b"%d" % len(data))
        head = [] if self.has_begun else [_make_head(status, [*headers, length])]
        self.has_begun = True
        body = h11.Data(data=b"" if self.method == "HEAD" else data)
        await self._connection.send(*head, body, h11.EndOfMessage())

    async def reply_json(self, value: Any, status: int = 200) -> None:
        """Send a reply of JSON; errors are final."""
        await self.reply(encode(value), JSON if status < 400 else JSON + FINAL, status)

    def on_unread(self, callback: Callable[[], object]) -> None:
        """Call it where the connection was closed with the reply unread, and that shows soon."""
        self._connection.on_unread = callback, anyio.current_time() + UNREAD_S


def _make_head(status: int, headers: Headers) -> h11.Response:
    reason = HTTPStatus(status).phrase
    return h11.Response(status_code=status, headers=headers, reason=reason)


Handler = Callable[[Exchange], Awaitable[None]]


class _Connection:
    """A connection of a client.

    Attributes:
        on_unread: What to call where the last reply turns out to be unread, and until when.
    """

    def __init__(self, stream: SocketStream, config: GatewayConfig) -> None:
        self._stream = stream
        self._config = config
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES - 1)
        self.on_unread: tuple[Callable[[], object], float] | None = None

    async def serve(self, handle: Handler) -> None:
        """Answer requests, one after the other, until either side ends."""
        try:
            patience_s = self._config.head_s
            while (head := await self._read_head(patience_s)) is not None:
                await handle(Exchange(self, head, self._config))
                if self._protocol.their_state is h11.SEND_BODY:
                    await self._skip_body()
                if self._protocol.their_state is h11.SEND_BODY:
                    break
                if self._protocol.our_state is not h11.DONE:
                    break
                self._protocol.start_next_cycle()
                patience_s = self._config.idle_s
        except anyio.BrokenResourceError:
            if self.on_unread is not None and anyio.current_time() < self.on_unread[1]:
                self.on_unread[0]()
        except (ClientLeftError, GatewayError, h11.RemoteProtocolError, anyio.ClosedResourceError):
            pass  # it left, or what follows its request is no HTTP
        except Exception:
            logger.exception("a connection failed")

    async def read_data(self) -> bytes | None:
        """Some of a request's body; None at its end."""
        if self._protocol.they_are_waiting_for_100_continue:
            await self.send(h11.InformationalResponse(status_code=100, headers=[]))
        while True:
            try:
                event = self._protocol.next_event()
            except h11.RemoteProtocolError as error:
                raise GatewayError(400, "invalid_request", str(error)) from None
            if isinstance(event, h11.Data):
                return bytes(event.data)
            if isinstance(event, h11.EndOfMessage):
                return None
            try:
                self._protocol.receive_data(await self._stream.receive())
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                raise ClientLeftError from None

    async def watch_client(self) -> None:
        """Read ahead until the client leaves."""
        try:
            while len(self._protocol.trailing_data[0]) < MAX_HEAD_BYTES:
                self._protocol.receive_data(await self._stream.receive())
            await anyio.sleep_forever()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            raise ClientLeftError from None

    async def send(self, *events: h11.Event) -> None:
        """Send events; the system has taken every byte then."""
        data = b"".join(self._protocol.send(event) or b"" for event in events)
        try:
            with anyio.fail_after(self._config.write_s):
                await self._stream.send(data)
        except (TimeoutError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await anyio.aclose_forcefully(self._stream)
            raise ClientLeftError from None

    async def _read_head(self, patience_s: float) -> h11.Request | None:
        """The head of the next request; None where there is none to be answered."""
        fault, is_begun = "Request head too slow.", False
        with anyio.move_on_after(patience_s) as scope:
            try:
                while (event := self._protocol.next_event()) is h11.NEED_DATA:
                    if not is_begun and self._protocol.trailing_data[0]:
                        scope.deadline, is_begun = anyio.current_time() + self._config.head_s, True
                    try:
                        self._protocol.receive_data(await self._stream.receive())
                    except anyio.EndOfStream:
                        return None
            except h11.RemoteProtocolError as error:
                is_large, is_begun = error.error_status_hint == 431, True
                fault = "Request head too large." if is_large else "Invalid HTTP request received."
            else:
                if not isinstance(event, h11.Request):
                    return None
                self.on_unread = None  # who asks again has read the answer
                return event
        if is_begun:
            body = fault.encode()
            headers = [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
            await self.send(_make_head(400, headers), h11.Data(data=body), h11.EndOfMessage())
            if not scope.cancelled_caught:
                await self._drain()
        return None

    async def _skip_body(self) -> None:
        """Let the client send the rest of a body that nobody wants, and so read its reply."""
        with anyio.move_on_after(DRAIN_S):
            while await self.read_data() is not None:
                pass

    async def _drain(self) -> None:
        """Let the client finish what it sends, so that it reads its reply; then leave it."""
        with anyio.move_on_after(DRAIN_S):
            await self._stream.send_eof()
            try:
                while True:
                    await self._stream.receive()
            except anyio.EndOfStream:
                pass


@asynccontextmanager
async def serve_http(config: GatewayConfig, handle: Handler) -> AsyncIterator[str]:
    """Serve on an asyncio loop in a thread of its own while the block runs; gives its URL.

    At the end of the block connections are cut, and what is being answered is cancelled.

    Raises:
        ConfigError: The address cannot be listened on, or h11 is not installed.
    """
    if h11 is None:
        raise ConfigError("the gateway needs the package h11: pip install 'rollout-rl[gateway]'")
    post, started, urls = loop_poster(), anyio.Event(), list[str]()
    count = 0

    async def serve_connection(stream: SocketStream) -> None:
        nonlocal count
        count += 1
        try:
            async with stream:
                if count <= config.max_connections:
                    await _Connection(stream, config).serve(handle)
        finally:
            count -= 1

    async def serve() -> None:
        host, port = config.host, config.port
        try:
            listener = await anyio.create_tcp_listener(
                local_host=host, local_port=port, backlog=BACKLOG
            )
        except OSError as error:
            raise ConfigError(
                f"gateway.host = {host!r}, gateway.port = {port}: cannot listen there: {error}"
            ) from None
        async with listener:
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            urls.append((config.public_url or _format_url(host, port)).rstrip("/"))
            post(started.set)
            await listener.serve(serve_connection)

    with closing(WorkerThreads(cleanup_s=DRAIN_S)) as threads:
        async with open_task_group() as tasks:
            tasks.start_soon(partial(threads.run_asyncio, "gateway", serve, is_apart=True))
            await started.wait()
            yield urls[0]


def _format_url(host: str, port: int) -> str:
    """As this machine reaches it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
