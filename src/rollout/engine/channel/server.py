"""The engine's end: serves one core to drivers that hold the secret.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from rollout.engine.channel.core_hosting import carry_out
from rollout.engine.channel.framing import CONNECTION_ERRORS, FrameStream
from rollout.engine.channel.handshake import HANDSHAKE_S, authenticate_client
from rollout.engine.channel.media import CACHE_BYTES
from rollout.engine.channel.messages import Welcome, client_messages
from rollout.engine.channel.server_session import ServerSession
from rollout.engine.channel.sockets import limit_unacknowledged, wrap_tls
from rollout.errors import EngineError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from anyio.abc import ByteStream, Listener, SocketStream

    from rollout.engine.channel.messages import Operation
    from rollout.engine.core import EngineCore

logger = logging.getLogger("rollout.engine")

#: Connections at once that have not proved the secret; what comes meanwhile waits in the system.
MAX_UNAUTHENTICATED = 64
#: Connections that the system holds until they are accepted.
BACKLOG = 128
#: Before the next attempt where a connection could not be accepted, for want of descriptors.
ACCEPT_BACKOFF_S = 0.1


class EngineServer:
    """Serves one core to any number of drivers, each over a connection of its own.

    A session is its connection: when that ends, the session's requests are aborted. A quiet
    driver with an open connection is never taken for dead.

    Args:
        media_cache_bytes: Images and videos cached for each connection.
        tls: Encrypts connections; None: they are not.
    """

    def __init__(
        self,
        core: EngineCore,
        secret: bytes,
        *,
        media_cache_bytes: int = CACHE_BYTES,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._core = core
        self._secret = secret
        self._tls = tls
        self._media_cache_bytes = media_cache_bytes
        self._unauthenticated = anyio.CapacityLimiter(MAX_UNAUTHENTICATED)
        self._operations = anyio.Lock()
        self._operation_scope = anyio.CancelScope()
        self._is_closing = False

    async def serve(self, listeners: Sequence[Listener[SocketStream]]) -> None:
        """Serve every connection that comes, until cancelled.

        One that cannot be accepted, for want of descriptors for example, is tried again; that
        ends nothing that is served already.
        """
        async with anyio.create_task_group() as tasks:
            for listener in listeners:
                tasks.start_soon(self._accept, listener, tasks)
            try:
                await anyio.sleep_forever()
            finally:
                self.cancel_operation()

    async def _accept(self, listener: Listener[SocketStream], tasks: anyio.abc.TaskGroup) -> None:
        is_failing = False
        while True:
            async with self._unauthenticated:
                pass  # accept no more than may wait for their handshake
            try:
                stream = await listener.accept()  # type: ignore[attr-defined]  # sockets' have it
            except OSError as error:
                if not is_failing:  # it may fail ten times a second
                    logger.warning("connections cannot be accepted now: %s", error)
                is_failing = True
                await anyio.sleep(ACCEPT_BACKOFF_S)
            else:
                is_failing = False
                tasks.start_soon(self.serve_connection, stream)

    async def serve_connection(self, stream: ByteStream) -> None:
        """Serve one connection until it ends; returns without an error whatever the peer does."""
        try:
            limit_unacknowledged(stream)
            async with self._unauthenticated:
                with anyio.fail_after(HANDSHAKE_S):
                    stream = await wrap_tls(stream, self._tls, server_side=True)
                    frames = FrameStream(stream, client_messages)
                    hello, proof = await authenticate_client(frames, self._secret, self._core.info)
                    async with self._operations:  # a broken session's may change the weights
                        frames.send_nowait(Welcome(proof, self._core.info))
                    await frames.flush()
            frames.max_frame_bytes = hello.settings.max_frame_bytes
            session = ServerSession(
                self._core, frames, hello.settings, self.carry_out, self._media_cache_bytes
            )
        except (*CONNECTION_ERRORS, TimeoutError) as error:
            logger.debug("a handshake failed: %r", error)
        else:
            await session.run()
        finally:
            with anyio.CancelScope(shield=True):  # or what comes after would be skipped
                await anyio.aclose_forcefully(stream)

    async def carry_out(self, operation: Operation) -> str:
        """Have the core do it, one operation at a time; returns its result.

        Cancelled, as by the end of the connection that asked, the operation is finished first:
        weights that are half in place would serve nobody.

        Raises:
            EngineError: The core cannot do it, or the engine closes; or whatever the core raises.
        """
        async with self._operations:
            if not self._is_closing:
                with anyio.CancelScope(shield=True) as self._operation_scope:
                    return await carry_out(self._core, operation)
        raise EngineError("the engine closes")

    def cancel_operation(self) -> None:
        """Have the operation that is under way end at once, and start none: the engine closes."""
        self._is_closing = True
        self._operation_scope.cancel()
