"""The engine's side of the channel: requests in, chunks out.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from rollout.engine.process.client_session import ClientSession
from rollout.engine.process.media_store import MediaStore
from rollout.engine.process.session_prefixes import PrefixStore
from rollout.engine.process.unauthenticated import UnauthenticatedConnections, max_unauthenticated
from rollout.engine.wire.handshake import greet_as_server, handshake_frames
from rollout.engine.wire.protocol import CONNECTION_ERRORS
from rollout.engine.wire.tls import encrypted_server

if TYPE_CHECKING:
    from anyio.abc import ByteStream

    from rollout.engine.core import EngineCore
    from rollout.engine.wire.frames import FrameStream
    from rollout.engine.wire.handshake import ServerHandshake
    from rollout.engine.wire.tls import TlsFiles

logger = logging.getLogger("rollout.engine")

#: Two thousand trajectories of 32k tokens.
PREFIX_BYTES = 256 * 1024 * 1024
#: A thousand pictures of a megapixel.
MEDIA_BYTES = 1024 * 1024 * 1024


class EngineServer:
    """Serves one core to any number of clients.

    A client whose connections break may come back for `Terms.reconnect_s`, as the client itself
    asked for; then its requests are aborted. A quiet client with an open socket is never taken
    for dead. Connections that have not proved to hold the secret are few at once,
    and none stays for long.

    Args:
        prefix_bytes: Token prefixes kept for all trajectories together.
        media_bytes: Images and videos kept for all clients together.
        tls: What connections are encrypted with.

    Attributes:
        unauthenticated: Connections that have not proved the secret yet.

    Raises:
        EngineError: The certificate or its key cannot be used.
    """

    def __init__(
        self,
        core: EngineCore,
        secret: bytes,
        *,
        prefix_bytes: int = PREFIX_BYTES,
        media_bytes: int = MEDIA_BYTES,
        tls: TlsFiles | None = None,
    ) -> None:
        self.unauthenticated = UnauthenticatedConnections(max_unauthenticated())
        self._core = core
        self._encrypted = encrypted_server(tls)
        self._prefixes = PrefixStore(prefix_bytes)
        self._media = MediaStore(media_bytes)
        self._secret = secret
        self._sessions: dict[str, ClientSession] = {}

    async def serve_connection(self, stream: ByteStream) -> None:
        """Serve one connection; returns without an error whatever the peer does.

        A client's first connection is served until the client is gone for good, later ones until
        they break.
        """
        handshake: ServerHandshake | None = None
        try:
            with self.unauthenticated.admitted():
                stream = await self._encrypted(stream)
                frames = handshake_frames(stream)
                handshake = await greet_as_server(frames, self._secret, lambda: self._core.info)
            if handshake is not None:
                await self._serve(handshake, frames)
        except CONNECTION_ERRORS as error:
            logger.debug("connection dropped during the handshake: %r", error)
        finally:
            with anyio.CancelScope(shield=True):  # or what comes after would be skipped
                await anyio.aclose_forcefully(stream)

    async def _serve(self, handshake: ServerHandshake, frames: FrameStream) -> None:
        hello = handshake.hello
        session = self._sessions.get(hello.session)
        if session is not None:
            await session.serve(handshake, frames)
        elif hello.received is not None:
            await handshake.refuse("this session is over")
        else:
            session = ClientSession(
                self._core, hello.session, hello.terms, self._prefixes, self._media
            )
            self._sessions[session.key] = session
            try:
                await session.host(handshake, frames)
            finally:
                del self._sessions[session.key]
