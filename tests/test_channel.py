"""The channel to one engine, in virtual time: cuts, silence, sessions, deadlines, streaming."""

from __future__ import annotations

import random  # noqa: TID251  (a seed determines the cuts)
from array import array
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from trio.testing import MockClock

from fake_core import CountingCore
from rollout.engine.core import Chunk, GenerationRequest, SamplingParams
from rollout.engine.pool.generation import Generation
from rollout.engine.process import client_session
from rollout.engine.process.session_prefixes import PrefixStore
from rollout.engine.wire import frames
from rollout.engine.channel.messages import ClientExpectations, SendWhole, Submit, ChannelSettings
from rollout.errors import ChannelError
from rollout.token_prefix import TokenPrefix
from wires import Asker, Wire, messages_of, packed, prefix_of

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
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 200))]
)
async def test_cut_in_mid_stream_nothing_is_lost_and_nothing_comes_twice(seed: int) -> None:
    dice = random.Random(seed)
    wire = Wire(CountingCore(token_s=0.05))
    wire.max_read, wire.latency_s = dice.choice([None, 11, 50]), dice.choice([0.0, 0.03])
    async with wire.channel() as channel:
        asker = Asker(channel)
        answers: dict[int, list[int]] = {}

        async def one(last: int) -> None:
            await anyio.sleep(dice.random())
            answers[last] = list((await asker.ask([last], 120)).ids)

        async with anyio.create_task_group() as tasks:
            for last in range(10):
                tasks.start_soon(one, last)
            for _ in range(5):
                await anyio.sleep(dice.random())
                wire.is_down = dice.random() < 0.5
                wire.cut(lambda unread: dice.randrange(unread + 1))
                await anyio.sleep(dice.random() * 3)
                wire.is_down = False
                await anyio.sleep(1.5)  # longer than it waits between two attempts
        assert answers == {last: expected(last, 120) for last in range(10)}
        assert (channel.in_flight, channel.zombies) == (0, 0)
        assert channel.tokens.taken == 1200
        assert channel.tokens.arrived == 1200
        assert len(asker.gone) == len(set(asker.gone)) == 10


async def test_cut_for_longer_than_allowed_requests_fail_and_the_engine_forgets_them() -> None:
    core = CountingCore(token_s=0.5)
    wire = Wire(core)
    async with wire.channel(ChannelSettings(reconnect_s=2.0)) as channel:
        asker = Asker(channel)
        generation, pending = asker.submit([1], 1000)
        await anyio.sleep(1.2)
        start = anyio.current_time()
        wire.is_down = True
        wire.cut()
        await pending.done.wait()
        assert anyio.current_time() - start == pytest.approx(2.0)
        assert list(generation.ids) == [2, 3]
        assert pending.error == "engine-0: the connection broke (BrokenResourceError: )"
        await anyio.sleep(0.5)
        assert not core._aborted


async def test_cut_with_reconnect_s_zero_is_the_end_at_once() -> None:
    wire = Wire(CountingCore(token_s=0.5))
    async with wire.channel(ChannelSettings(reconnect_s=0)) as channel:
        _, pending = Asker(channel).submit([1], 1000)
        await anyio.sleep(1.2)
        start = anyio.current_time()
        wire.cut()
        await pending.done.wait()
        assert anyio.current_time() == start


async def test_cut_request_is_cancelled_meanwhile_its_abort_arrives_later() -> None:
    core = CountingCore(token_s=0.5)
    wire = Wire(core)
    async with wire.channel() as channel:
        asker = Asker(channel)
        _, pending = asker.submit([1], 1000)
        await anyio.sleep(1.2)
        wire.is_down = True
        wire.cut()
        await anyio.sleep(0.1)
        channel.abandon_nowait(pending)
        assert channel.zombies == 1
        wire.is_down = False
        await anyio.sleep(2)
        assert (channel.zombies, len(asker.gone), len(core._aborted)) == (0, 1, 0)


async def test_channel_leaves_the_engine_ends_its_requests_at_once() -> None:
    core = CountingCore(token_s=0.5)
    wire = Wire(core)
    async with anyio.create_task_group() as tasks:

        async def client() -> None:
            async with wire.channel(ChannelSettings(reconnect_s=1000)) as channel:
                Asker(channel).submit([1], 1000)
                await anyio.sleep(1)
            assert not core._aborted

        tasks.start_soon(client)
        await anyio.sleep(3)
        assert not wire.server._sessions


# --- silence


async def test_loop_blocked_for_a_minute_loses_nothing(clock: MockClock) -> None:
    wire = Wire(CountingCore(token_s=0.5))
    wire.latency_s = 0.2
    async with wire.channel() as channel:
        asker = Asker(channel)
        _, pending = asker.submit([1], 20)
        for _ in range(20):
            await anyio.sleep(0.3)
            clock.jump(60.0)  # nothing else runs meanwhile
        await pending.done.wait()
        assert not channel.lost.is_set()


async def test_loop_blocked_just_before_the_verdict_hears_what_had_arrived(
    clock: MockClock,
) -> None:
    wire = Wire(CountingCore(token_s=1000))
    async with wire.channel(ChannelSettings(heartbeat_s=4.9, heartbeat_timeout_s=5.0)) as channel:
        await anyio.sleep(4.89)
        clock.jump(60.0)
        await anyio.sleep(20)
        assert not channel.lost.is_set()


async def test_silent_engine_is_lost_after_exactly_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(CountingCore(token_s=1000))
    start = anyio.current_time()
    async with wire.channel(ChannelSettings(heartbeat_s=0.7, heartbeat_timeout_s=2.5)) as channel:
        _, pending = Asker(channel).submit([1], 20)
        await anyio.sleep(1.0)
        monkeypatch.setattr(client_session.ClientSession, "take", lambda *_: None)
        await pending.done.wait()
        assert pending.error == "engine-0: silent for 2.5 s"
        assert anyio.current_time() - start == pytest.approx(0.7 + 2.5)  # it was heard at 0.7


async def test_quiet_client_with_an_open_socket_is_never_dead_to_the_server() -> None:
    wire = Wire(CountingCore(token_s=100.0))
    async with wire.channel(ChannelSettings(heartbeat_s=1e6, heartbeat_timeout_s=1e7)) as channel:
        generation = await Asker(channel).ask([1], 36)  # an hour without a word of the client
        assert list(generation.ids) == expected(1, 36)


# --- sessions


async def turns(channel: Any, prefix: TokenPrefix, count: int) -> list[int]:
    """So many turns of one trajectory; the bytes of ids that each sent."""
    asker, sent = Asker(channel), messages_of(channel, "data")
    for number in range(count):
        generation = await asker.ask(prefix, 5)
        assert list(generation.ids) == expected(prefix.ids[-1], 5)
        prefix.extend(generation.ids)
        prefix.extend(array("i", [10 + number, 20 + number]))
    return [len(message.ids) // 4 for message in sent if isinstance(message, Submit)]


async def test_turns_send_only_what_the_replica_does_not_have() -> None:
    core = RememberingCore()
    wire = Wire(core)
    async with wire.channel() as channel:
        prefix = prefix_of(list(range(100)))
        assert await turns(channel, prefix, 6) == [100, 2, 2, 2, 2, 2]
    whole = list(prefix.ids)
    assert [list(array("i", prompt)) for prompt in core.prompts] == [
        whole[: 100 + 7 * turn] for turn in range(6)
    ]


async def test_turn_prefix_was_evicted_it_is_sent_whole() -> None:
    core = RememberingCore()
    wire = Wire(core, prefix_bytes=4 * 150)
    async with wire.channel() as channel:
        one, other = prefix_of(list(range(100))), prefix_of(list(range(50, 140)))
        for prefix in (one, other, one, other):
            await turns(channel, prefix, 1)
    assert [len(prompt) // 4 for prompt in core.prompts] == [100, 90, 107, 97]
    assert core.prompts[2] == one.packed(0, 107)


async def test_turn_prefix_disagrees_it_is_sent_whole() -> None:
    core = RememberingCore()
    wire = Wire(core)
    async with wire.channel() as channel:
        prefix = prefix_of(list(range(100)))
        await turns(channel, prefix, 1)
        changed = prefix_of([7, *list(prefix.ids)[1:]])
        session = channel._greeter.session
        changed.note_sent(session, prefix.sent_to(session))
        changed.extend(array("i", [1, 2]))
        generation = await Asker(channel).ask(changed, 3, request_id="f" * 32)
        assert list(generation.ids) == expected(2, 3)
    assert core.prompts[-1] == changed.packed()


async def test_turn_cancelled_while_the_prefix_is_missing_leaves_no_zombie() -> None:
    wire = Wire(RememberingCore(), prefix_bytes=0)
    wire.latency_s = 0.5
    async with wire.channel() as channel:
        asker, prefix = Asker(channel), prefix_of(list(range(100)))
        await asker.ask(prefix, 2)
        prefix.extend(array("i", [5]))
        _, pending = asker.submit(prefix, 2)
        channel.abandon_nowait(pending)
        assert channel.zombies == 1
        await anyio.sleep(3)
        assert (channel.zombies, len(asker.gone)) == (0, 2)


async def test_turn_after_a_cancelled_one_goes_on_from_its_prompt() -> None:
    core = RememberingCore(token_s=1.0)
    wire = Wire(core)
    async with wire.channel() as channel:
        asker, prefix = Asker(channel), prefix_of(list(range(100)))
        _, pending = asker.submit(prefix, 50)
        await anyio.sleep(4.5)
        channel.abandon_nowait(pending)
        await anyio.sleep(1)
        sent = messages_of(channel, "data")
        prefix.extend(array("i", [400]))
        assert list((await asker.ask(prefix, 2)).ids) == [401, 402]
        assert [len(message.ids) for message in sent if isinstance(message, Submit)] == [4]
    assert core.prompts[-1] == prefix.packed()


def test_prefix_store_forgets_the_oldest_and_counts_its_bytes() -> None:
    store = PrefixStore(1000)
    for name in "abc":
        assert store.prompt_of(("c", name), name, 0, 0, bytes(400)) is not None
    assert store.bytes == 800
    assert store.prompt_of(("c", "a"), "x", 100, 0, b"") is None
    assert store.prompt_of(("c", "c"), "y", 100, 1, b"") is None, "another sum"
    store.drop_client("c")
    assert store.bytes == 0


class RememberingCore(CountingCore):
    """Notes every prompt that it is given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.prompts: list[bytes] = []

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        self.prompts.append(request.prompt_ids)
        return super().generate(request)


# --- requests


async def test_deadline_passes_the_engine_aborts_by_itself() -> None:
    core = CountingCore(token_s=1.0)
    wire = Wire(core)
    async with wire.channel() as channel:
        asker = Asker(channel)
        late, pending = asker.submit([1], 100, deadline=anyio.current_time() + 10.25)
        soon, sooner = asker.submit([5], 100, deadline=anyio.current_time() + 3.25)
        start = anyio.current_time()
        await sooner.done.wait()
        assert anyio.current_time() - start == pytest.approx(3.25)
        assert (list(soon.ids), soon.finish_reason) == ([6, 7, 8], "abort")
        await pending.done.wait()
        assert anyio.current_time() - start == pytest.approx(10.25)
        assert (len(late.ids), late.finish_reason) == (10, "abort")
        assert not core._aborted


async def test_request_id_in_use_is_refused_and_the_engine_goes_on() -> None:
    wire = Wire(CountingCore(token_s=1.0))
    async with wire.channel() as channel:
        asker = Asker(channel)
        asker.submit([1], 3, request_id="r" * 32)
        generation, again = asker.submit([5], 3, request_id="r" * 32)
        await again.done.wait()
        assert again.error == f"request id '{'r' * 32}' is in use"
        assert list((await asker.ask([7], 2)).ids) == [8, 9]


async def test_request_longer_than_a_frame_is_refused_before_anything_is_sent() -> None:
    wire = Wire(CountingCore())
    async with wire.channel(ChannelSettings(max_frame_bytes=4096)) as channel:
        asker = Asker(channel)
        with pytest.raises(ChannelError) as caught:
            asker.submit([1] * 2000, 3)
        assert str(caught.value) == (
            "engine-0: the request does not fit: Submit of 8110 bytes; 4096 are allowed"
        )
        assert (channel.in_flight, len(asker.gone)) == (0, 1)
        assert list((await asker.ask([7], 2)).ids) == [8, 9]


async def test_answer_longer_than_a_frame_fails_its_request_alone() -> None:
    class Verbose(CountingCore):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
            count = request.sampling.max_new_tokens
            ids = packed([1] * count)
            yield Chunk(request_id=request.request_id, ids=ids, log_probs=ids, finish_reason="stop")

    wire = Wire(Verbose())
    async with wire.channel(ChannelSettings(max_frame_bytes=4096)) as channel:
        asker = Asker(channel)
        _, pending = asker.submit([1], 1000)
        await pending.done.wait()
        assert pending.error.startswith("the answer does not fit: Chunk of 8")
        assert len((await asker.ask([1], 10)).ids) == 10


async def test_writer_has_much_to_write_callers_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "HIGH_WATER_BYTES", 1000)
    wire = Wire(CountingCore())
    async with wire.channel() as channel:
        asker = Asker(channel)
        wire.latency_s = 0.0
        queued: list[int] = []
        for number in range(3):
            asker.submit([number] * 100, 1)
        assert channel.is_full

        async def one(number: int) -> None:
            ids = packed([number] * 100)
            request = Submit(f"w{number:031x}", ids, SamplingParams(max_new_tokens=1))
            if channel.is_full:
                await channel.wait_for_room(100)
            pending = channel.submit_nowait(request, Generation(), lambda _: None)
            queued.append(channel._data._queued)
            await pending.done.wait()

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(one, number)
                await anyio.lowlevel.checkpoint()
        assert len(queued) == 12
        assert max(queued) < 1000 + 4 * 500  # the mark, and those whose turn it was


async def test_tokens_are_gathered_by_count_and_by_time() -> None:
    wire = Wire(CountingCore(token_s=1.0))
    async with wire.channel(ChannelSettings(stream_interval=4, stream_interval_s=2.5)) as channel:
        generation, pending = Asker(channel).submit([1], 6)
        seen: list[tuple[float, int]] = []
        start = anyio.current_time()
        while not pending.done.is_set():
            if not seen or seen[-1][1] != len(generation.ids):
                seen.append((round(anyio.current_time() - start, 1), len(generation.ids)))
            await anyio.sleep(0.1)
        # The first waits for 2.5 s and brings the second and third; the end brings the others.
        assert [count for _, count in seen] == [0, 3]
        assert seen[1][0] == pytest.approx(3.5, abs=0.11)
        assert list(generation.ids) == expected(1, 6)


async def test_tokens_are_gathered_by_count() -> None:
    wire = Wire(CountingCore(token_s=1.0))
    async with wire.channel(ChannelSettings(stream_interval=4, stream_interval_s=100)) as channel:
        generation, pending = Asker(channel).submit([1], 10)
        await anyio.sleep(4.5)
        assert len(generation.ids) == 4
        await pending.done.wait()
        assert list(generation.ids) == expected(1, 10)


async def test_engine_that_never_ends_its_answer_is_an_error() -> None:
    class Silent(CountingCore):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
            yield Chunk(request_id=request.request_id, ids=packed([4]), log_probs=packed([0]))

    wire = Wire(Silent())
    async with wire.channel() as channel:
        generation, pending = Asker(channel).submit([1], 10)
        await pending.done.wait()
        assert pending.error == "the engine ended its answer without saying why"
        assert list(generation.ids) == [4]


async def test_further_facts_of_tokens_arrive_as_they_are() -> None:
    class Telling(CountingCore):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
            k = request.top_log_probs
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

    wire = Wire(Telling())
    async with wire.channel(ChannelSettings(stream_interval=8)) as channel:
        generation = Generation()
        pending = channel.submit_nowait(
            Submit(
                "r" * 32,
                packed([1]),
                SamplingParams(max_new_tokens=2, top_log_probs=3),
                routed_experts=True,
            ),
            generation,
            lambda _: None,
        )
        await pending.done.wait()
    assert generation.top_ids == packed([0, 1, 2]) * 2
    assert generation.routed_experts == b"\0\0\0\1\1\1"


MISMATCHES = {
    "the driver's tokenizer knows 1001 ids, the engine's model 1000": ClientExpectations(vocab_size=1001),
    "the driver's end tokens are [5], the engine's [0]": ClientExpectations(eos_ids=(5,)),
    "the driver expects model other, the engine serves counting": ClientExpectations(fingerprint="other"),
}


@pytest.mark.parametrize("reason", MISMATCHES)
async def test_hello_driver_takes_something_else_for_granted_is_refused(reason: str) -> None:
    wire = Wire(CountingCore())
    with pytest.raises(ChannelError) as caught:
        async with wire.channel(facts=MISMATCHES[reason]):
            pytest.fail("connected")
    assert str(caught.value) == (
        f"engine-0: no channel to the engine: the engine refused the connection: {reason}"
    )


async def test_send_whole_of_an_unknown_request_is_ignored() -> None:
    wire = Wire(CountingCore())
    async with wire.channel() as channel:
        channel._on_other("data", SendWhole("nobody"))
        assert list((await Asker(channel).ask([7], 2)).ids) == [8, 9]
