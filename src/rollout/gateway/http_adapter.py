"""uvicorn and starlette: the one module that imports them.

uvicorn bounds how long a connection lies idle; what else a hostile client can do to a connection is
bounded here.
"""

from __future__ import annotations

import fcntl
import logging
import socket
import sys
import termios
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import anyio
import attrs
from starlette.routing import Route, Router
from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from rollout.gateway.asgi import Application

logger = logging.getLogger("rollout.gateway")

#: A request's line and headers together.
MAX_HEAD_BYTES = 64 * 1024
LARGE_HEAD = "Request head too large."
#: For what of a refused request's body is still on its way, and for handlers when the server ends.
DRAIN_S = 5.0
#: A peer that is silent for this long is asked whether it is there, and given up after as much.
PROBE_S = 30
#: What a client is told that waits with its body, ahead of the reply.
CONTINUE = b"HTTP/1.1 100 "
#: State of a connection that the peer has closed in order, in Linux's TCP_INFO.
CLOSE_WAIT = 8


@attrs.frozen(kw_only=True)
class ConnectionLimits:
    """Bounds on the connections of a server; see `GatewayConfig`."""

    max_connections: int
    head_s: float
    idle_s: float


class Connection(HttpToolsProtocol):
    """A connection that neither a slow head nor a dead peer keeps.

    Attributes:
        has_left: Whether the client has closed it, or it broke.
    """

    def __init__(self, limits: ConnectionLimits, **parts: Any) -> None:
        super().__init__(**parts)
        self.logger = logger
        self._limits = limits
        self._timer: Any = None
        self._is_head = True
        self._head_bytes = 0
        self._on_unread: Callable[[], object] | None = None
        self._on_leave: Callable[[], object] | None = None
        self.has_left = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            transport.abort()
            return
        _probe_peer(transport.get_extra_info("socket"))
        self._allow(self._limits.head_s, self._end_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_timer()
        if exc is not None:
            self.has_left = True
            self._tell_unread()
        self._on_unread = None
        self._tell_leave()

    def eof_received(self) -> None:
        self.has_left = True
        self._tell_leave()
        if not _has_read_all(self.transport.get_extra_info("socket")):
            self._tell_unread()

    def _tell_leave(self) -> None:
        on_leave, self._on_leave = self._on_leave, None
        if on_leave is not None:
            on_leave()

    def _tell_unread(self) -> None:
        on_unread, self._on_unread = self._on_unread, None
        if on_unread is not None:
            on_unread()

    def data_received(self, data: bytes) -> None:
        if self._is_head:
            self._head_bytes += len(data)
            if self._timer is None:
                self._allow(self._limits.head_s, self._end_slow_head)
        super().data_received(data)
        if self._is_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(LARGE_HEAD)

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read; a head by its size, which was too large before all else."""
        super().send_400_response(LARGE_HEAD if self._head_bytes > MAX_HEAD_BYTES else msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._on_unread = None  # who asks again has read the answer
        self.scope["rollout.connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        if sum(map(len, chain([self.url], *self.headers))) > MAX_HEAD_BYTES:
            raise ValueError(LARGE_HEAD)  # which ends the parsing, and is refused in these words
        self._is_head = False
        self._head_bytes = 0
        self._forget_timer()
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = _Joining(self.cycle.transport, self.loop)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_head = True
        self._forget_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._on_leave = None
        if not self._is_head:  # what the client still sends is dropped, for a while
            self._allow(DRAIN_S, self.transport.abort)

    @property
    def has_whole_request(self) -> bool:
        """Whether nothing more is to come of the request that came last."""
        return self._is_head

    async def flush(self, seconds: float) -> bool:
        """Wait until the system has taken every byte; False where the client left before.

        A client that does not read for so long is left.
        """
        transport = self.transport
        transport.set_write_buffer_limits(high=0)  # from here on, what is not taken has to wait
        if self.flow.write_paused:
            with anyio.move_on_after(seconds) as scope:
                await self.flow.drain()
            if scope.cancelled_caught:
                transport.abort()
                return False
        transport.set_write_buffer_limits()
        return not self.has_left

    def on_leave(self, callback: Callable[[], object]) -> None:
        """Call it once the client leaves, unless the reply is complete before."""
        self._on_leave = callback
        self.flow.resume_reading()  # a long body may have stopped it
        if self.has_left:
            self._tell_leave()

    def leave_unanswered(self) -> None:
        """The client has left before its answer was whole: nobody misses the rest."""
        if self.cycle is not None:
            self.cycle.disconnected = True

    def if_unread(self, callback: Callable[[], object]) -> None:
        """Call it where the client turns out to have closed before it read all of the reply.

        A system resets a connection that is closed with bytes unread, and one that gets bytes when
        it is closed already.
        """
        self._on_unread = callback

    def _allow(self, seconds: float, end: Callable[[], object]) -> None:
        self._forget_timer()
        self._timer = self.loop.call_later(seconds, end)

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_slow_head(self) -> None:
        if self._head_bytes:
            self._refuse("Request head too slow.")
        else:
            self.transport.close()

    def _refuse(self, message: str) -> None:
        if not self.transport.is_closing():
            self.send_400_response(message)


class _Joining:
    """What a reply is written to: its head waits for what follows in the same step of the loop.

    Apart they would be two system calls and two packets, and wake a client twice.
    """

    def __init__(self, transport: Any, loop: Any) -> None:
        self._transport, self._loop = transport, loop
        self._head: bytes | None = None
        self._sending: Any = None  # sends a head that nothing follows; None until there is one

    def write(self, data: bytes) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._sending.cancel()
            self._transport.write(head + data)
        elif self._sending is not None or data.startswith(CONTINUE):
            self._transport.write(data)
        else:
            self._head, self._sending = data, self._loop.call_soon(self._send_head)

    def _send_head(self) -> None:
        if self._head is not None and not self.is_closing():
            self.write(b"")

    def close(self) -> None:
        self._send_head()
        self._transport.close()

    def is_closing(self) -> bool:
        return bool(self._transport.is_closing())


def _probe_peer(sock: Any) -> None:
    """Have the system notice a peer that is gone without a word."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = {"TCP_KEEPIDLE": PROBE_S, "TCP_KEEPINTVL": max(1, PROBE_S // 3), "TCP_KEEPCNT": 3}
    for name, value in probes.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _has_read_all(sock: Any) -> bool:
    """Whether a peer that has closed its end had received every byte before; True if unknown."""
    if sys.platform != "linux" or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    try:
        state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        unreceived = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4)
    except OSError:
        return False
    return state == CLOSE_WAIT and not any(unreceived)


def router(routes: Iterable[tuple[str, Application]], default: Application) -> Application:
    """An application that picks another by path; its parameters are in ``scope["path_params"]``."""
    table = [Route(path, _Endpoint(application)) for path, application in routes]
    return Router(table, redirect_slashes=False, default=default)


class _Endpoint:
    """An object, so that starlette hands it the connection as it is, whatever the method."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._application(scope, receive, send)


@asynccontextmanager
async def serving(
    application: Application, listener: socket.socket, limits: ConnectionLimits
) -> AsyncIterator[None]:
    """Serve on this loop, asyncio's, while the block runs; installs no signal handlers.

    At the end connections are cut, and what was being answered is cancelled.
    """
    config = Config(
        application,
        http=partial(Connection, limits),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]
        backlog=4096,
    )
    config.load()
    server = Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await _end(server)


async def _end(server: Server) -> None:
    for each in server.servers:
        each.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    handlers, ended = server.server_state.tasks, anyio.Event()

    def note_end(_: object) -> None:
        if not handlers:
            ended.set()

    for task in handlers:
        task.add_done_callback(note_end)
    if handlers:
        with anyio.move_on_after(DRAIN_S):
            await ended.wait()
    for task in list(handlers):
        task.cancel()
