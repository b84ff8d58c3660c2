"""Frames and the handshake, over streams in memory."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from fake_core import CountingCore
from rollout.engine.channel.channel import connect_channel
from rollout.engine.channel.framing import FrameStream
from rollout.engine.channel.handshake import (
    authenticate_client,
    authenticate_server,
    prove,
)
from rollout.engine.channel.messages import (
    PROTOCOL_VERSION,
    Challenge,
    ChannelSettings,
    ClientExpectations,
    FrameError,
    Hello,
    Welcome,
    client_messages,
    server_messages,
)
from rollout.engine.channel.server import EngineServer
from rollout.engine.channel.sockets import connect_engine
from rollout.engine.core import EngineInfo
from rollout.engine.placement.memory import MemoryByteStream, memory_stream_pair

pytestmark = pytest.mark.anyio
SECRET = b"s" * 32
INFO = EngineInfo(
    vocab_size=10, eos_ids=(1,), context_length=99, fingerprint="f", max_requests=4, core="c"
)


Peer = Callable[[FrameStream[Any]], Awaitable[object]]


async def shake(server: Peer, client: Peer) -> tuple[object, object]:
    """Run both sides; what each returned or raised."""
    results: dict[str, object] = {}

    async def side(name: str, peer: Peer, stream: MemoryByteStream) -> None:
        decoder: Any = client_messages if name == "server" else server_messages
        frames: FrameStream[Any] = FrameStream(stream, decoder)
        try:
            results[name] = await peer(frames)
        except Exception as error:
            results[name] = error
        await frames.aclose()

    left, right = memory_stream_pair()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(side, "server", server, left)
        tasks.start_soon(side, "client", client, right)
    return results["server"], results["client"]


async def serve(frames: FrameStream[Any]) -> Hello:
    """The engine's side."""
    hello, proof = await authenticate_client(frames, SECRET, INFO)
    frames.send_nowait(Welcome(proof, INFO))
    await frames.flush()
    return hello


def connect(secret: bytes = SECRET) -> Peer:
    """The driver's side."""
    return lambda frames: authenticate_server(
        frames, secret, ChannelSettings(stream_interval=7), ClientExpectations()
    )


async def test_handshake_client_with_another_secret_is_refused() -> None:
    hello, error = await shake(serve, connect(b"x"))
    assert isinstance(hello, FrameError)
    assert (
        str(error) == "the engine refused the connection: the proof of the shared secret is wrong"
    )


async def test_handshake_server_with_another_secret_is_found_out() -> None:
    async def impostor(frames: FrameStream[Any]) -> None:
        frames.send_nowait(Challenge(PROTOCOL_VERSION, b"n" * 32))
        await frames.flush()
        hello = await frames.read_one()
        assert isinstance(hello, Hello)
        # It sends back what a client would prove: the sides must not be interchangeable.
        frames.send_nowait(Welcome(prove(SECRET, "client", hello.nonce, b"n" * 32), INFO))
        await frames.flush()

    _, error = await shake(impostor, connect())
    assert str(error) == "the engine did not prove that it holds the shared secret"


async def test_handshake_other_protocol_version_names_both() -> None:
    async def older(frames: FrameStream[Any]) -> None:
        frames.send_nowait(Challenge(3, b"n" * 32))
        await frames.flush()

    _, error = await shake(older, connect())
    assert str(error) == "the engine speaks protocol version 3; this driver 5"


@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
async def test_server_has_the_system_end_connections_of_vanished_machines() -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        async with anyio.create_task_group() as tasks:
            server = EngineServer(CountingCore(), SECRET)
            accepted: list[socket.socket] = []

            async def serve(stream: SocketStream) -> None:
                accepted.append(stream.extra(SocketAttribute.raw_socket))
                await server.serve_connection(stream)

            tasks.start_soon(listener.serve, serve)
            port = listener.extra(SocketAttribute.local_port)
            connect = partial(connect_engine, "127.0.0.1", port)
            async with connect_channel("engine-0", connect, SECRET) as channel:
                assert channel.info.core == "counting"
                option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
                # A driver whose loop is blocked for a minute takes nothing meanwhile either.
                assert accepted[0].getsockopt(*option) == 75_000
            tasks.cancel_scope.cancel()
