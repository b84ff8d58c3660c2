"""TCP connections between driver and engines, and their encryption.

The engine shows a certificate that the driver's authority has signed; the driver is known by the
shared secret. Host names are not compared: engines are found by address, and the authority signs
for nothing else.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING

import anyio
import msgspec
from anyio.streams.tls import TLSStream

from rollout.errors import EngineError

if TYPE_CHECKING:
    from anyio.abc import ByteStream

#: How long the peer's machine may leave what was sent unacknowledged: after that it has vanished.
USER_TIMEOUT_S = 75


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files.

    Attributes:
        certificate, key: The engine's, on its machine.
        authority: The certificates that the driver trusts, on its machine.
    """

    certificate: str
    key: str
    authority: str


def make_context(files: TlsFiles | None, *, is_server: bool) -> ssl.SSLContext | None:
    """Make the engine's or the driver's side of encrypted connections, TLS 1.3."""
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        if is_server:
            names = f"tls_certificate = {files.certificate!r} with channel.tls_key = {files.key!r}"
            context.load_cert_chain(files.certificate, files.key)
        else:
            names = f"tls_authority = {files.authority!r}"
            context.check_hostname = False
            context.load_verify_locations(files.authority)
    except OSError as error:
        raise EngineError(f"channel.{names}: cannot be used: {error}") from None
    return context


async def connect_engine(host: str, port: int, tls: TlsFiles | None = None) -> ByteStream:
    """Open a connection to an engine's port."""
    context = make_context(tls, is_server=False)
    return await wrap_tls(await anyio.connect_tcp(host, port), context, server_side=False)


async def wrap_tls(
    stream: ByteStream, context: ssl.SSLContext | None, *, server_side: bool
) -> ByteStream:
    """Encrypt a connection; without a context it stays as it is. Closed where that fails."""
    if context is None:
        return stream
    try:
        return await TLSStream.wrap(
            stream, server_side=server_side, ssl_context=context, standard_compatible=False
        )
    except BaseException:
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(stream)
        raise


def limit_unacknowledged(stream: ByteStream) -> None:
    """Have the system break a connection whose peer's machine has vanished.

    A stream that is no socket stays as it is.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux only
    raw = stream.extra(anyio.abc.SocketAttribute.raw_socket, None)
    if option is not None and raw is not None:
        raw.setsockopt(socket.IPPROTO_TCP, option, 1000 * USER_TIMEOUT_S)
