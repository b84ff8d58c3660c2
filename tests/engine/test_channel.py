"""The channel to one engine, in virtual time: breaks, silence, deadlines, coalescing."""

from __future__ import annotations

import gc
import itertools
import random  # noqa: TID251  (a seed determines the cuts)
import weakref
from array import array
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from trio.testing import MockClock

from fake_core import CountingCore
from faulty_cores import UpdatableCore
from rollout.engine.channel.messages import (
    ChannelSettings,
    LoadWeights,
    Submit,
)
from rollout.engine.channel.server import EngineServer
from rollout.engine.core import Chunk, EngineLoad, GenerationRequest, SamplingParams
from rollout.engine.weights import DiskWeights
from rollout.errors import ChannelError
from rollout.scopes import open_task_group
from wires import Request, Requester, Wire, packed, submit

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock() -> MockClock:
    """Virtual time that a test may also move by itself, as a blocked loop does."""
    return MockClock(autojump_threshold=0)


@pytest.fixture
def anyio_backend(clock: MockClock) -> object:
    """Virtual time."""
    return ("trio", {"clock": clock})


def expected(last: int, count: int) -> list[int]:
    """What `CountingCore` answers."""
    return [(last + 1 + i) % 1000 for i in range(count)]


# --- broken connections


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 100))]
)
async def test_cut_at_any_byte_each_request_ends_once_with_a_prefix_of_its_answer(
    seed: int,
) -> None:
    dice = random.Random(seed)
    core = CountingCore(token_s=0.05)
    wire = Wire(core)
    wire.max_read, wire.latency_s = dice.choice([None, 11, 50]), dice.choice([0.0, 0.03])
    async with wire.channel() as channel:
        requester = Requester(channel)
        requests = {last: requester.submit([last], 120) for last in range(10)}
        await anyio.sleep(dice.random() * 5)
        wire.cut(lambda unread: dice.randrange(unread + 1))
        await channel.lost.wait()
        assert channel.lost_cause == "connection"
        for last, request in requests.items():
            assert request.ends == [channel.lost_reason]
            assert request.ids == expected(last, len(request.ids))
        await anyio.sleep(0.1)
        assert not core._aborted, "the engine computes nothing for a session that is over"
        async with wire.channel_again() as again:  # the engine lives on
            assert await Requester(again).generate([7], 2) == [8, 9]


async def test_channel_that_was_left_or_lost_is_freed_without_a_collection() -> None:
    wire, channels = Wire(CountingCore(token_s=0.05)), []
    gc.collect()
    gc.disable()  # a runtime collects what is old very seldom
    try:
        async with wire.channel():
            for is_cut in (False, True):
                async with wire.channel_again() as channel:
                    await anyio.sleep(0.2)
                    if is_cut:
                        wire.cut()
                        await channel.lost.wait()
                channels.append(weakref.ref(channel))
                del channel
        await anyio.sleep(0.1)
        assert [each() for each in channels] == [None, None]
    finally:
        gc.enable()


async def test_submit_on_a_lost_channel_ends_the_request_at_once() -> None:
    async with Wire(CountingCore()).channel() as channel:
        channel.lose("the engine died", "process")
        request = Requester(channel).submit([1])
        assert request.ends == ["engine-0: the engine died"]
        with pytest.raises(ChannelError, match="the engine died"):
            await channel.command(LoadWeights(1, DiskWeights("x")))


async def test_break_under_a_weight_change_it_is_finished_and_the_new_session_knows() -> None:
    """Half-loaded weights would serve nobody; the next handshake waits for the whole ones."""
    core = UpdatableCore(load_s=3.0)
    wire = Wire(core)
    async with wire.channel() as channel:
        async with open_task_group() as tasks:

            async def load() -> None:
                with pytest.raises(ChannelError):
                    await channel.command(LoadWeights(5, DiskWeights("new")))

            tasks.start_soon(load)
            await anyio.sleep(1.0)
            wire.cut()
            await channel.lost.wait()
            start = anyio.current_time()
            async with wire.channel_again() as again:
                assert anyio.current_time() - start == pytest.approx(2.0)
                assert again.info.weight_version == 5
    assert core.loaded == ["new"]


# --- silence


async def test_loop_blocked_for_a_minute_loses_nothing(clock: MockClock) -> None:
    wire = Wire(CountingCore(token_s=0.5))
    wire.latency_s = 0.2
    async with wire.channel() as channel:
        request = Requester(channel).submit([1], 20)
        for _ in range(20):
            await anyio.sleep(0.3)
            clock.jump(60.0)  # nothing else runs meanwhile
        await request.done.wait()
        assert channel.lost_cause is None


@pytest.mark.parametrize("blocked_at", [4.89, 5.01])
async def test_loop_blocked_just_before_the_verdict_hears_what_had_arrived(
    clock: MockClock, blocked_at: float
) -> None:
    settings = ChannelSettings(heartbeat_s=4.9, heartbeat_timeout_s=5.0)
    async with Wire(CountingCore(token_s=1000)).channel(settings) as channel:
        await anyio.sleep(blocked_at)
        clock.jump(60.0)
        await anyio.sleep(20)
        assert channel.lost_cause is None


async def test_quiet_client_with_an_open_connection_is_never_dead_to_the_server() -> None:
    wire = Wire(CountingCore(token_s=100.0))
    async with wire.channel(ChannelSettings(heartbeat_s=1e3, heartbeat_timeout_s=1e7)) as channel:
        assert await Requester(channel).generate([1], 36) == expected(1, 36)  # an hour


async def test_load_reports_come_every_heartbeat() -> None:
    wire = Wire(CountingCore(token_s=1000))
    async with wire.channel() as channel:
        loads: list[tuple[float, EngineLoad]] = []
        channel.on_load = lambda load: loads.append((anyio.current_time(), load))
        Requester(channel).submit([1])
        await anyio.sleep(9)
        times = [at for at, _ in loads]
        assert [b - a for a, b in itertools.pairwise(times)] == pytest.approx([2.0] * 4)
        assert loads[-1][1].running == 1


async def test_abort_that_the_core_loses_is_sent_again_with_each_report() -> None:
    class Deaf(CountingCore):
        heard = 0

        def abort_nowait(self, request_id: str) -> None:
            self.heard += 1
            if self.heard == 3:
                super().abort_nowait(request_id)

    core = Deaf(token_s=1.0)
    async with Wire(core).channel() as channel:
        request = Requester(channel).submit([1], 100, request_id="r" * 32)
        await anyio.sleep(0.5)
        channel.abort_nowait("r" * 32)
        assert channel.aborting == 1
        await request.done.wait()
        assert (core.heard, request.finish_reason) == (3, "abort")
        assert channel.aborting == 0
        assert request.ids == expected(1, len(request.ids)), "tokens come until the end"
        channel.abort_nowait("r" * 32)  # ignored
        assert channel.aborting == 0


# --- requests


async def test_deadline_passes_the_engine_aborts_by_itself() -> None:
    core = CountingCore(token_s=1.0)
    async with Wire(core).channel() as channel:
        requester = Requester(channel)
        late = requester.submit([1], 100, remaining_s=10.25)
        soon = requester.submit([5], 100, remaining_s=3.25)
        start = anyio.current_time()
        await soon.done.wait()
        assert 3.25 <= anyio.current_time() - start <= 3.25 + 2.0  # with the next load report
        assert (soon.ids, soon.finish_reason) == (expected(5, len(soon.ids)), "abort")
        await late.done.wait()
        assert 10.25 <= anyio.current_time() - start <= 10.25 + 2.0
        assert not core._aborted


async def test_request_id_in_use_is_refused_and_the_engine_continues() -> None:
    async with Wire(CountingCore(token_s=1.0)).channel() as channel:
        submit(channel, [1], 3, request_id="r" * 32)
        again = submit(channel, [5], 3, request_id="r" * 32)
        await again.done.wait()
        assert again.error == f"request id '{'r' * 32}' is in use"
        assert await Requester(channel).generate([7], 2) == [8, 9]


async def test_request_longer_than_a_frame_is_refused_before_anything_is_sent() -> None:
    async with Wire(CountingCore()).channel(ChannelSettings(max_frame_bytes=4096)) as channel:
        requester = Requester(channel)
        with pytest.raises(ChannelError) as caught:
            requester.submit([1] * 2000, 3)
        assert str(caught.value) == (
            "engine-0: the request does not fit: Submit of 8107 bytes; 4096 are allowed"
        )
        assert await requester.generate([7], 2) == [8, 9]


async def test_engine_that_never_ends_its_answer_is_an_error() -> None:
    class Silent(CountingCore):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
            yield Chunk(request_id=request.request_id, ids=packed([4]), log_probs=packed([0]))

    async with Wire(Silent()).channel(ChannelSettings(stream_interval=8)) as channel:
        request = Requester(channel).submit([1], 10)
        await request.done.wait()
        assert request.error == "the engine ended its answer without saying why"
        assert request.ids == [4]


# --- coalescing


async def test_tokens_are_coalesced_by_count() -> None:
    settings = ChannelSettings(stream_interval=4, stream_interval_s=100)
    async with Wire(CountingCore(token_s=1.0)).channel(settings) as channel:
        request = Requester(channel).submit([1], 10)
        await anyio.sleep(4.5)
        assert len(request.ids) == 4
        await request.done.wait()
        assert request.ids == expected(1, 10)


async def test_further_facts_of_tokens_arrive_joined() -> None:
    class Telling(CountingCore):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
            k = request.sampling.top_log_probs
            for offset in range(2):
                yield Chunk(
                    request_id=request.request_id,
                    offset=offset,
                    ids=packed([offset]),
                    log_probs=packed([0]),
                    top_ids=packed(list(range(k))),
                    top_log_probs=packed([0] * k),
                    routed_experts=bytes([offset] * 3) if request.routed_experts else b"",
                    finish_reason="stop" if offset else None,
                )

    chunks: list[Chunk] = []

    class Keeping(Request):
        def take(self, chunk: Chunk) -> bool:
            chunks.append(chunk)
            return super().take(chunk)

    request = Keeping()
    async with Wire(Telling()).channel(ChannelSettings(stream_interval=8)) as channel:
        sampling = SamplingParams(max_new_tokens=2, top_log_probs=3)
        channel.submit_nowait(Submit("r" * 32, packed([1]), sampling, routed_experts=True), request)
        await request.done.wait()
    (chunk,) = chunks
    assert (array("i", chunk.ids).tolist(), chunk.top_ids) == ([0, 1], packed([0, 1, 2]) * 2)
    assert chunk.routed_experts == b"\0\0\0\1\1\1"


# --- who comes


async def test_strangers_leave_after_the_handshake_s_time_and_drivers_get_their_turn() -> None:
    wire = Wire(CountingCore())
    async with wire.channel():
        for _ in range(100):  # more than may be there at once
            await wire.connect()
        start = anyio.current_time()
        async with wire.channel_again() as channel:
            assert anyio.current_time() - start <= 5.1
            assert await Requester(channel).generate([7], 2) == [8, 9]
        await anyio.sleep(5.1)
        assert wire.connections == 1, "the strangers are gone, and the first driver is not"


class FullListener:
    """Has streams to accept, and errors in between."""

    def __init__(self, *come: Any) -> None:
        self._come = list(come)

    async def accept(self) -> Any:
        if not self._come:
            await anyio.sleep_forever()
        comes = self._come.pop(0)
        if isinstance(comes, OSError):
            raise comes
        return comes


async def test_accept_without_descriptors_is_tried_again() -> None:
    wire = Wire(CountingCore())
    server: EngineServer = wire.server
    async with wire.channel():
        theirs, ours = wire.make_pair()
        full = OSError(24, "Too many open files")
        async with open_task_group() as tasks:
            listeners: Any = [FullListener(full, full, theirs)]
            tasks.start_soon(server.serve, listeners)
            assert (await ours.receive())[4:6] == b"\x93\x01", "a challenge"
            await ours.aclose()
