"""Encrypted connections between driver and engines.

The engine shows a certificate that the driver's authority has signed; the driver is known by the
shared secret. Host names are not looked at: engines are found by address, and the authority signs
for nothing else.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import ssl
from functools import partial
from typing import TYPE_CHECKING

import anyio
import msgspec
from anyio.streams.tls import TLSStream

from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import ByteStream


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files.

    Attributes:
        certificate, key: The engine's, on its machine.
        authority: The certificates that the driver trusts, on its machine.
    """

    certificate: str
    key: str
    authority: str


def encrypted_server(
    files: TlsFiles | None,
) -> Callable[[ByteStream], Awaitable[ByteStream]]:
    """The engine's side: makes a stream of a connection; itself where nothing is encrypted.

    Raises:
        EngineError: Its certificate or key cannot be used.
    """
    if files is None:
        return _plain
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(files.certificate, files.key)
    except OSError as error:
        raise EngineError(
            f"channel.tls_certificate = {files.certificate!r} with channel.tls_key = "
            f"{files.key!r}: cannot be used: {error}"
        ) from None
    return partial(TLSStream.wrap, server_side=True, ssl_context=context, standard_compatible=False)


async def _plain(stream: ByteStream) -> ByteStream:
    return stream


def _driver_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    try:
        context.load_verify_locations(files.authority)
    except OSError as error:
        raise EngineError(
            f"channel.tls_authority = {files.authority!r}: cannot be used: {error}"
        ) from None
    return context


async def encrypted(stream: ByteStream, files: TlsFiles | None) -> ByteStream:
    """The driver's side; the stream itself where nothing is encrypted.

    Raises:
        EngineError: Its authority cannot be used.
        OSError: The engine's certificate is not of the authority.
    """
    if files is None:
        return stream
    try:
        context = _driver_context(files)
        return await TLSStream.wrap(
            stream, server_side=False, ssl_context=context, standard_compatible=False
        )
    except BaseException:
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(stream)
        raise
