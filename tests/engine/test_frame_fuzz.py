"""Random and mutated frames crash neither side; `make test-full` tries a million."""

from __future__ import annotations

import random  # noqa: TID251  (a seed determines the frames)
import struct
from collections.abc import AsyncIterator, Callable

import anyio
import anyio.lowlevel
import msgspec
import pytest

from fake_core import CountingCore
from rollout.engine.channel import messages
from rollout.engine.channel.messages import encoder
from rollout.engine.core import Chunk, EngineLoad, GenerationRequest, SamplingParams
from slow_cases import slow_after
from wires import Requester, Wire, packed

pytestmark = pytest.mark.anyio

#: Frames of one seed, half of them to each side.
FRAMES = 10_000
SEEDS = slow_after(1, range(100))
#: Frames of one connection.
AT_ONCE = 100
IDS = [f"{number:032x}" for number in range(8)]


def client_messages(dice: random.Random) -> msgspec.Struct:
    """Something that a client might say."""
    request_id = dice.choice(IDS)
    makers: list[Callable[[], msgspec.Struct]] = [
        lambda: messages.Submit(
            request_id,
            packed([dice.randrange(1000)] * dice.randrange(1, 5)),
            SamplingParams(max_new_tokens=dice.choice([1, 2, 3])),
            dice.choice(["s", "t", ""]),
            remaining_s=dice.choice([None, 0.0, 1e-3, 1e300]),
            media=dice.choice([(), (), (("d", 0, 1),)]),
        ),
        lambda: messages.Abort(request_id),
        lambda: messages.MediaPart(digest="d", content=b"x", is_last=True),
        lambda: messages.Hello(2, b"", b""),
    ]
    return dice.choice(makers)()


def server_messages(dice: random.Random) -> msgspec.Struct:
    """Something that an engine might say."""
    request_id = dice.choice(IDS)
    makers: list[Callable[[], msgspec.Struct]] = [
        lambda: Chunk(
            request_id=request_id,
            offset=dice.choice([0, 0, 1, 2, 2**53]),
            ids=packed([dice.randrange(1000)] * dice.randrange(3)),
            log_probs=packed([0] * dice.randrange(3)),
            weight_version=dice.choice([0, 2**31 - 1]),
            finish_reason=dice.choice([None, None, "stop", "abort", "error", "rejected"]),
        ),
        lambda: messages.LoadReport(EngineLoad(running=1, kv_used=dice.choice([0.5, 1e308]))),
        lambda: messages.SendMedia(request_id, dice.choice([(), ("d",)])),
        lambda: messages.Refused("no"),
    ]
    return dice.choice(makers)()


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


def framed(dice: random.Random, message: Callable[[random.Random], msgspec.Struct]) -> bytes:
    """So many frames that the peer reads one after the other, until one is faulty."""
    payloads = [frames(dice, message) for _ in range(AT_ONCE)]
    return b"".join(struct.pack("<I", len(payload)) + payload for payload in payloads)


@pytest.mark.parametrize("seed", SEEDS)
async def test_frames_of_a_mad_client_leave_the_server_serving(seed: int) -> None:
    dice = random.Random(seed)
    wire = Wire(BriefCore())
    async with wire.channel() as sane:
        for _ in range(FRAMES // 2 // AT_ONCE):
            async with wire.channel_again() as channel:
                channel._frames._outgoing += framed(dice, client_messages)
                channel._frames._has_outgoing.set()
                for _ in range(dice.randrange(20)):
                    await anyio.lowlevel.checkpoint()
        assert await Requester(sane).generate([7], 2) == [8, 9]
        assert not wire.core._aborted


@pytest.mark.parametrize("seed", SEEDS)
async def test_frames_of_a_mad_engine_end_its_channel_at_most(seed: int) -> None:
    dice = random.Random(seed)
    wire = Wire(CountingCore(token_s=1e6))
    async with wire.channel():
        for _ in range(FRAMES // 2 // AT_ONCE):
            async with wire.channel_again() as channel:
                requester = Requester(channel)
                requests = [requester.submit([1], request_id=each) for each in IDS[:6]]
                await wire.streams[-1].send(framed(dice, server_messages))
                for _ in range(dice.randrange(20)):
                    await anyio.lowlevel.checkpoint()
                    channel.abort_nowait(dice.choice(IDS))
            assert [len(request.ends) for request in requests] == [1] * 6, "each ends exactly once"


@pytest.mark.parametrize("seed", range(3))
async def test_bytes_of_strangers_are_dropped_and_the_server_continues(seed: int) -> None:
    dice = random.Random(seed)
    wire = Wire(CountingCore())
    async with wire.channel() as channel:
        for _ in range(20):
            stream = await wire.connect()
            noise = frames(dice, client_messages)
            length = dice.choice([len(noise), dice.randrange(2**32), 0])
            await stream.send(struct.pack("<I", length) + noise)
            if dice.random() < 0.5:
                await stream.send_eof()
            await anyio.sleep(dice.random() * 11)
            await stream.aclose()
        assert await Requester(channel).generate([7], 2) == [8, 9]
