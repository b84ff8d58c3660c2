"""Frames and the handshake, over the in-memory streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import pytest
from trio.testing import MockClock

from rollout.engine.core import Chunk, EngineInfo
from rollout.engine.placement.memory import MemoryByteStream, memory_stream_pair
from rollout.engine.wire import protocol
from rollout.engine.wire.frames import FrameStream
from rollout.engine.wire.handshake import greet_as_client, greet_as_server, proof_of
from rollout.engine.channel.messages import (
    Abort,
    FrameError,
    Hello,
    Ping,
    Welcome,
    decode_from_client,
    decode_from_server,
)

pytestmark = pytest.mark.anyio
SECRET = b"s" * 32
INFO = EngineInfo(
    vocab_size=10, eos_ids=(1,), context_length=99, fingerprint="f", max_requests=4, core="c"
)


@pytest.fixture
def anyio_backend() -> object:
    """Virtual time."""
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


async def test_frames_short_reads_arrive_whole_and_in_order() -> None:
    left, right = memory_stream_pair(max_read=3)
    sender, receiver = FrameStream(left), FrameStream(right)
    sent = [Ping(n) for n in range(5)] + [Abort("x" * 32)]
    for message in sent:
        sender.send_nowait(message)
    await sender.flush()
    received: list[object] = []
    while len(received) < len(sent):
        received += [decode_from_client(payload) for payload in await receiver.read()]
    assert received == sent


async def test_frames_message_that_cannot_be_encoded_leaves_the_stream_whole() -> None:
    left, right = memory_stream_pair()
    sender, receiver = FrameStream(left), FrameStream(right)
    sender.send_nowait(Ping(1))
    with pytest.raises(OverflowError):
        sender.send_nowait(Ping(2**70))
    sender.send_nowait(Ping(2))
    await sender.flush()
    payloads = await receiver.read()
    assert [decode_from_client(payload) for payload in payloads] == [Ping(1), Ping(2)]


async def test_frames_latency_delays_by_exactly_that() -> None:
    left, right = memory_stream_pair(latency_s=0.25)
    sender, receiver = FrameStream(left), FrameStream(right)
    start = anyio.current_time()
    sender.send_nowait(Ping(1))
    await sender.flush()
    await receiver.read()
    assert anyio.current_time() - start == pytest.approx(0.25, abs=1e-9)


async def test_read_peer_closes_between_frames_is_the_end() -> None:
    left, right = memory_stream_pair()
    await left.aclose()
    with pytest.raises(anyio.EndOfStream):
        await FrameStream(right).read()


async def test_read_peer_closes_within_a_frame_says_so() -> None:
    left, right = memory_stream_pair()
    await left.send(b"\x10\0\0\0abc")
    await left.aclose()
    with pytest.raises(FrameError, match="ended in the middle of a frame"):
        await FrameStream(right).read()


async def test_read_announced_length_past_the_maximum_is_refused() -> None:
    left, right = memory_stream_pair()
    await left.send(b"\xff\xff\xff\xff")
    with pytest.raises(FrameError, match="4294967295 bytes was announced; 1000 at most"):
        await FrameStream(right, max_frame=1000).read()


async def test_cut_in_the_middle_of_a_frame_breaks_the_reader() -> None:
    left, right = memory_stream_pair()
    FrameStream(left).send_nowait(Ping(1))
    sender = FrameStream(left)
    sender.send_nowait(Abort("y" * 32))
    await sender.flush()
    left.cut(after=lambda unread: unread // 2)
    with pytest.raises(anyio.BrokenResourceError):
        await FrameStream(right).read()


async def test_send_peer_reads_nothing_waits_at_the_window() -> None:
    left, right = memory_stream_pair()
    with anyio.move_on_after(1) as scope:
        for _ in range(5):
            await left.send(b"x" * 300_000)
    assert scope.cancelled_caught
    received = 0
    while received < 4 * 300_000:
        received += len(await right.receive(1 << 20))


def test_chunk_crosses_the_wire_unchanged() -> None:
    chunk = Chunk(
        request_id="r" * 32,
        offset=4,
        ids=b"\1\0\0\0",
        log_probs=b"\0\0\0\0",
        weight_version=3,
        finish_reason="stop",
    )
    assert decode_from_server(protocol.encoder.encode(chunk)) == chunk


Peer = Callable[[FrameStream], Awaitable[object]]


async def shake(server: Peer, client: Peer) -> tuple[object, object]:
    """Run both sides; what each returned or raised."""
    results: dict[str, object] = {}

    async def side(name: str, peer: Peer, stream: MemoryByteStream) -> None:
        frames = FrameStream(stream)
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


async def serve(frames: FrameStream) -> Hello | None:
    """The engine's side of the handshake."""
    handshake = await greet_as_server(frames, SECRET, lambda: INFO)
    if handshake is not None:
        await handshake.welcome(INFO)
    return handshake and handshake.hello


async def test_handshake_same_secret_gives_the_engines_facts() -> None:
    hello, welcome = await shake(
        serve, partial(greet_as_client, secret=SECRET, role="data", session="s")
    )
    assert isinstance(hello, Hello)
    assert (hello.role, hello.session) == ("data", "s")
    assert isinstance(welcome, Welcome)
    assert welcome.info == INFO


async def test_handshake_client_with_another_secret_is_refused() -> None:
    hello, error = await shake(
        serve, partial(greet_as_client, secret=b"x", role="data", session="s")
    )
    assert hello is None
    assert (
        str(error) == "the engine refused the connection: the proof of the shared secret is wrong"
    )


async def test_handshake_server_with_another_secret_is_found_out() -> None:
    async def impostor(frames: FrameStream) -> None:
        frames.send_nowait(protocol.Challenge(protocol.PROTOCOL_VERSION, b"n" * 32))
        await frames.flush()
        (payload,) = await frames.read()
        hello = decode_from_client(payload)
        assert isinstance(hello, Hello)
        # It sends back what a client would prove: the sides must not be interchangeable.
        proof = proof_of(SECRET, "client", hello.nonce, b"n" * 32)
        frames.send_nowait(protocol.Welcome(proof, INFO))
        await frames.flush()

    _, error = await shake(
        impostor, partial(greet_as_client, secret=SECRET, role="data", session="s")
    )
    assert str(error) == "the engine did not prove that it holds the shared secret"


async def test_handshake_other_protocol_version_names_both() -> None:
    async def older(frames: FrameStream) -> None:
        frames.send_nowait(protocol.Challenge(0, b"n" * 32))
        await frames.flush()

    _, error = await shake(older, partial(greet_as_client, secret=SECRET, role="data", session="s"))
    assert str(error) == "the engine speaks protocol version 0; this driver 3"


async def test_handshake_client_sends_something_else_first_is_refused() -> None:
    async def rude(frames: FrameStream) -> object:
        frames.send_nowait(Ping(1))
        await frames.flush()
        await frames.read()
        return decode_from_server((await frames.read())[0])

    hello, answer = await shake(serve, rude)
    assert hello is None
    assert answer == protocol.Refused("expected a hello, got Ping")
