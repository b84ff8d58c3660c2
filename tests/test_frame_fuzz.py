"""Random and mutated frames crash neither side; `make test-full` tries a million."""

from __future__ import annotations

import random  # noqa: TID251  (a seed determines the frames)
import struct
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from trio.testing import MockClock

from fake_core import CountingCore
from rollout.engine.core import Chunk, EngineLoad, GenerationRequest, SamplingParams
from rollout.engine.wire import protocol
from rollout.engine.channel.messages import FrameError, ChannelSettings, encoder
from rollout.token_prefix import TokenPrefix
from wires import SECRET, Asker, Wire, packed

pytestmark = pytest.mark.anyio

#: Frames of one seed, half of them to each side.
FRAMES = 20_000
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 50))]
#: Frames of one connection.
AT_ONCE = 100
IDS = [f"{number:032x}" for number in range(8)]


@pytest.fixture
def anyio_backend() -> object:
    """Virtual time."""
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


def client_messages(dice: random.Random) -> msgspec.Struct:
    """Something that a client might say."""
    request_id = dice.choice(IDS)
    return dice.choice(
        [
            lambda: protocol.Submit(
                request_id,
                packed([dice.randrange(1000)] * dice.randrange(1, 5)),
                SamplingParams(max_new_tokens=dice.choice([1, 2, 3])),
                dice.choice(["s", "t", ""]),
                kept=dice.choice([0, 0, 0, 2, 2**40]),
                kept_sum=dice.randrange(10),
                has_prefix=dice.random() < 0.5,
                remaining_s=dice.choice([None, 0.0, 1e-3, 1e300]),
            ),
            lambda: protocol.Abort(request_id),
            lambda: protocol.Ping(dice.randrange(-(2**63), 2**63)),
            lambda: protocol.Pong(1),
            lambda: protocol.Ack(dice.choice([0, 1, 2**53])),
            lambda: protocol.Hello(2, "data", "s", b"", b""),
        ]
    )()


def server_messages(dice: random.Random) -> msgspec.Struct:
    """Something that an engine might say."""
    request_id = dice.choice(IDS)
    return dice.choice(
        [
            lambda: Chunk(
                request_id=request_id,
                offset=dice.choice([0, 0, 1, 2, 2**53]),
                ids=packed([dice.randrange(1000)] * dice.randrange(3)),
                log_probs=packed([0] * dice.randrange(3)),
                weight_version=dice.choice([0, 2**31 - 1]),
                finish_reason=dice.choice([None, None, "stop", "abort", "error", "rejected"]),
            ),
            lambda: protocol.Pong(3, EngineLoad(running=1, kv_used=dice.choice([0.5, 1e308]))),
            lambda: protocol.Ping(7),
            lambda: protocol.Ack(dice.choice([0, 1, 2**53])),
            lambda: protocol.SendWhole(request_id),
            lambda: protocol.Refused("no"),
        ]
    )()


def frames(dice: random.Random, message: Callable[[random.Random], msgspec.Struct]) -> bytes:
    """A payload: sound, mutated, nested beyond reason, or noise."""
    kind = dice.random()
    if kind < 0.05:
        return dice.randbytes(dice.randrange(60))
    if kind < 0.07:
        return dice.choice([b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff"]) * 5000
    payload = bytearray(encoder.encode(message(dice)))
    if kind < 0.5:
        for _ in range(dice.randrange(1, 4)):
            payload[dice.randrange(len(payload))] = dice.randrange(256)
        if dice.random() < 0.3:
            del payload[dice.randrange(len(payload)) :]
    return bytes(payload)


class BriefCore(CountingCore):
    """Answers a few tokens, however many a mutated request asks for."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        request.sampling = SamplingParams(max_new_tokens=2)
        return super().generate(request)


@pytest.mark.parametrize("seed", SEEDS)
async def test_frames_of_a_mad_client_leave_the_server_serving(seed: int) -> None:
    dice = random.Random(seed)
    wire = Wire(BriefCore())
    async with wire.channel() as sane:
        for _ in range(FRAMES // 2 // AT_ONCE):
            async with wire.channel_again() as channel:
                session = wire.server._sessions[channel._greeter.session]
                for _ in range(AT_ONCE):  # those after a faulty one had arrived with it
                    with suppress(FrameError):
                        session.take(dice.choice(protocol.ROLES), frames(dice, client_messages))
                    if dice.random() < 0.1 and not session._over.is_set():
                        await anyio.lowlevel.checkpoint()
        assert list((await Asker(sane).ask([7], 2)).ids) == [8, 9]
        assert not wire.core._aborted


@pytest.mark.parametrize("seed", SEEDS)
async def test_frames_of_a_mad_engine_end_its_channel_at_most(seed: int) -> None:
    dice = random.Random(seed)
    wire = Wire(CountingCore(token_s=1e6))
    async with wire.channel():
        for _ in range(FRAMES // 2 // AT_ONCE):
            async with wire.channel_again() as channel:
                asker = Asker(channel)
                pendings = list(submissions(asker, dice))
                for _ in range(AT_ONCE):
                    with suppress(FrameError):  # those after it had arrived with it
                        channel.take(dice.choice(protocol.ROLES), frames(dice, server_messages))
                    if dice.random() < 0.02:
                        channel.abandon_nowait(dice.choice(pendings)[1])
            assert len(asker.gone) == len(pendings), "each request is gone exactly once"
            for generation, pending in pendings:
                assert pending.done.is_set() or pending.generation is None
                assert len(generation.ids) == len(generation.log_probs)
                assert len(generation.ids) == sum(count for _, count in generation.versions)


def submissions(asker: Asker, dice: random.Random) -> Iterator[Any]:
    for request_id in IDS[:6]:
        prompt: Any = [1]
        if dice.random() < 0.5:
            prompt = TokenPrefix()
            prompt.extend(array("i", [1, 2]))
        yield asker.submit(prompt, request_id=request_id)


@pytest.mark.parametrize("seed", range(10))
async def test_bytes_of_strangers_are_dropped_and_the_server_goes_on(seed: int) -> None:
    dice = random.Random(seed)
    wire = Wire(CountingCore())
    async with wire.channel(ChannelSettings()) as channel:
        for _ in range(20):
            stream = await wire.connect()
            noise = frames(dice, client_messages)
            length = dice.choice([len(noise), dice.randrange(2**32), 0])
            await stream.send(struct.pack("<I", length) + noise)
            if dice.random() < 0.5:
                await stream.send_eof()
            await anyio.sleep(dice.random() * 11)
            await stream.aclose()
        assert list((await Asker(channel).ask([7], 2)).ids) == [8, 9]
    assert wire.server._secret == SECRET
