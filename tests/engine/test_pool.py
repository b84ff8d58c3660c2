"""The pool of engines: requests, cancellation, death and restart, in virtual time."""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, ClassVar

import anyio
import msgspec
import pytest

import fake_core
from fake_core import CountingCore
from pools import generate, make_pool
from rollout.engine.channel.channel import Channel
from rollout.engine.channel.child import ChildSpec
from rollout.engine.channel.messages import ChannelSettings
from rollout.engine.core import Chunk, EngineLoad, GenerationRequest, unpack_ids
from rollout.engine.placement.engine_process import encode_spec
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.placement import CoreSpec
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.errors import EngineError, LimitExceeded
from rollout.limits import NEVER, Clock, Deadline

pytestmark = [pytest.mark.anyio, pytest.mark.rollout(ceiling_s=3000)]


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every `WatchedCore` that a test starts."""
    made: list[Any] = []

    class WatchedCore(CountingCore):
        on_death: Any = None
        on_freeze: Any = None

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(fake_core, "WatchedCore", WatchedCore, raising=False)
    yield made
    assert all(not core._aborted for core in made), "requests were left in a core"


POOL_OPTIONS = ("policy", "wait_s", "backoff_s", "last_answer_s", "make_spec")


def pool_of(core: str = "WatchedCore", replicas: int = 1, **options: Any) -> EnginePool:
    pool = {name: options.pop(name) for name in POOL_OPTIONS if name in options}
    specs = [options] * replicas
    return make_pool(f"fake_core:{core}", *specs, placement=InProcess(max_read=7), **pool)


async def ask(pool: EnginePool, last: int, count: int, session: str = "s") -> Generation:
    return await generate(pool, [last], count, session=session)


def in_flight(pool: EnginePool) -> list[tuple[int, int]]:
    return [(r.in_flight, r.zombies) for r in pool.statistics()]


async def test_generate_returns_exactly_what_the_engine_sampled(cores: list[Any]) -> None:
    async with pool_of(token_s=0.5).serving() as pool:
        start = anyio.current_time()
        generation = await ask(pool, 41, 4)
        assert anyio.current_time() - start == pytest.approx(2.0)
    assert list(generation.ids) == [42, 43, 44, 45]
    assert list(generation.log_probs) == [-42 / 8, -43 / 8, -44 / 8, -45 / 8]
    assert generation.versions == [[3, 4]]
    assert generation.finish_reason == "length"
    assert generation.replica == "engine-0"


async def test_generate_cancelled_and_not_answered_in_time_keeps_what_it_had(
    cores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_of(token_s=1.0, last_answer_s=0.5).serving() as pool:
        monkeypatch.setattr(cores[0], "abort_nowait", lambda _: None)
        start, generation = anyio.current_time(), Generation()
        with anyio.move_on_after(2.2):
            await generate(pool, [7], 9, generation)
        assert anyio.current_time() - start == pytest.approx(2.2 + 0.5)
        await anyio.sleep(9.0)
        assert list(generation.ids) == [8, 9]
        (replica,) = pool.statistics()
        assert (replica.tokens.taken, replica.tokens.late, replica.in_flight) == (2, 7, 0)


async def test_generate_that_is_never_sent_takes_no_place_at_its_replica(
    cores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_long(channel: Channel) -> None:
        await anyio.sleep(2.0)

    async with pool_of(max_requests=1).serving() as pool:
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "wait_for_room", wait_long)
            with anyio.move_on_after(1.0):
                await ask(pool, 1, 1)
        assert in_flight(pool) == [(0, 0)]
        assert list((await ask(pool, 1, 1)).ids) == [2]


async def test_generate_waiter_of_higher_priority_is_served_first(cores: list[Any]) -> None:
    order: list[int] = []
    async with pool_of(token_s=1.0, max_requests=1).serving() as pool:

        async def one(number: int, priority: int) -> None:
            await generate(pool, [number], 1, priority=priority)
            order.append(number)

        async with anyio.create_task_group() as tasks:
            for number, priority in enumerate((0, -1, 0, 5, 0, 5)):
                tasks.start_soon(one, number, priority)
                await anyio.lowlevel.checkpoint()
            await anyio.sleep(1.5)  # it comes last, and is served next
            await one(6, 7)
    assert order == [0, 3, 6, 5, 2, 4, 1]


async def test_generate_waiter_cancelled_passes_its_turn_on(cores: list[Any]) -> None:
    async with pool_of(token_s=1.0, max_requests=1).serving() as pool:
        finished: list[str] = []

        async def one(name: str, patience_s: float) -> None:
            with anyio.move_on_after(patience_s):
                await ask(pool, 1, 1, session=name)
                finished.append(name)

        async with anyio.create_task_group() as tasks:
            for name, patience_s in (("a", 9.0), ("b", 1.0), ("c", 9.0)):
                tasks.start_soon(one, name, patience_s)
                await anyio.lowlevel.checkpoint()
        assert finished == ["a", "c"]
        assert in_flight(pool) == [(0, 0)]


async def test_generate_id_outside_the_vocabulary_does_not_leave_the_driver(
    cores: list[Any],
) -> None:
    async with pool_of(vocab_size=100).serving() as pool:
        with pytest.raises(EngineError) as caught:
            await generate(pool, [5, 100], 1)
    assert str(caught.value) == (
        "token id 100 at position 1 is outside the engine's vocabulary of 100 ids"
    )


async def test_open_start_takes_too_long_says_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever(self: object) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(fake_core.CountingCore, "start", forever)
    with pytest.raises(EngineError) as caught:
        async with pool_of("CountingCore").serving():
            pytest.fail("opened")
    assert str(caught.value) == "engine-0: not ready after engine.start_timeout_s = 5 s"


async def test_silent_engine_that_takes_no_new_connection_is_restarted(cores: list[Any]) -> None:
    async with pool_of(token_s=1000.0, policy="fail").serving() as pool:
        start = anyio.current_time()
        cores[0].on_freeze()
        with pytest.raises(EngineError, match=r"^engine-0: silent for 5.0 s$"):
            await ask(pool, 1, 1)
        assert anyio.current_time() - start == pytest.approx(5.0)
        with anyio.fail_after(5.0 + 5.0 + 2.0):  # `reconnect_s`, the last handshake, the pause
            while pool.statistics()[0].starts == 1:
                await anyio.sleep(0.5)
    assert len(cores) == 2


FAULTS = {
    "repeated": ([0, 1, 1, 2], [2, 3, 4]),
    "missing for a while": ([0, 2], [2, 2, 2]),
    "missing each time": ([1], "sent a faulty chunk: tokens 0 to 1 are missing"),
    "cut each time": ([0], "sent a faulty chunk: 3 bytes of ids with 3 bytes of log-probs"),
}


@pytest.mark.parametrize("kind", FAULTS)
async def test_faulty_answers_are_counted_or_refused(
    kind: str, cores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets, expected = FAULTS[kind]
    size = 3 if kind == "cut each time" else 4

    async def generate(self: Any, request: GenerationRequest) -> AsyncIterator[Chunk]:
        for offset in offsets:
            yield Chunk(
                request_id=request.request_id,
                offset=offset,
                ids=array("i", [2 + offset]).tobytes()[:size],
                log_probs=array("f", [0.0]).tobytes()[:size],
            )
        yield Chunk(request_id=request.request_id, offset=offsets[-1] + 1, finish_reason="stop")

    monkeypatch.setattr(fake_core.CountingCore, "generate", generate)
    async with pool_of().serving() as pool:
        if isinstance(expected, str):
            with pytest.raises(EngineError, match=expected):
                await ask(pool, 1, 3)
        else:
            assert list((await ask(pool, 1, 3)).ids) == expected
        await anyio.sleep(0.01)
        assert in_flight(pool) == [(0, 0)]


async def test_core_raises_request_fails_with_its_words_and_others_go_on(
    cores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fake_core.CountingCore.generate

    async def generate(self: Any, request: GenerationRequest) -> AsyncIterator[Chunk]:
        if request.sampling.max_new_tokens == 13:
            raise RuntimeError("bad luck")
        async with aclosing(real(self, request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk

    monkeypatch.setattr(fake_core.CountingCore, "generate", generate)
    async with pool_of().serving() as pool:
        with pytest.raises(EngineError, match=r"^RuntimeError: bad luck$"):
            await ask(pool, 1, 13)
        assert list((await ask(pool, 1, 2)).ids) == [2, 3]


def until(seconds: float) -> Clock:
    return Clock(Deadline.after(seconds, "limits.generation_s"))


async def ask_until(pool: EnginePool, generation: Generation, limit: Clock) -> None:
    with limit:
        await generate(pool, [7], 100, generation, limit=limit)


async def test_generate_deadline_keeps_tokens_and_the_engine_confirms(cores: list[Any]) -> None:
    async with pool_of(token_s=1.0).serving() as pool:
        start, generation = anyio.current_time(), Generation()
        with pytest.raises(LimitExceeded, match=r"^limits\.generation_s = 3\.5 s is over$"):
            await ask_until(pool, generation, until(3.5))
        assert anyio.current_time() - start == pytest.approx(3.5)
        assert list(generation.ids) == [8, 9, 10]
        assert in_flight(pool) == [(0, 0)]


async def test_generate_deadline_passes_while_waiting_for_a_place(cores: list[Any]) -> None:
    async with pool_of(token_s=1.0).serving() as pool:
        pool.drain("engine-0")
        start = anyio.current_time()
        with pytest.raises(LimitExceeded):
            await ask_until(pool, Generation(), until(2.5))
        assert anyio.current_time() - start == pytest.approx(2.5)
        assert in_flight(pool) == [(0, 0)]


async def test_request_that_waits_for_a_place_is_placed_where_its_trajectory_continues_at_once(
    cores: list[Any],
) -> None:
    """What carries a trajectory, and what continues it, may run before its task does."""
    clock = Clock()
    async with pool_of(token_s=1.0, max_requests=1).serving() as pool:
        generation = Generation()

        async def carried() -> None:
            await generate(pool, [2], 3, generation, limit=clock)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, 1, 5)
            await anyio.sleep(0.5)
            tasks.start_soon(carried)
            await anyio.sleep(0.5)
            clock.carry()
            clock.continue_carried(NEVER)
    assert generation.count == 3


# A core that can lose its engine says so, and the pool starts another.

LIFE_S = 10.0


class LosableCore(CountingCore):
    """Loses its engine ten seconds after its start."""

    async def watch(self) -> str:
        """Why, once it has."""
        await anyio.sleep(LIFE_S)
        return "its process ended"


async def test_core_that_says_it_is_lost_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_core, "LosableCore", LosableCore, raising=False)
    async with pool_of("LosableCore").serving() as pool:
        while pool.statistics()[0].starts < 2:
            await anyio.sleep(0.1)
        assert (await ask(pool, 7, 3)).ids.tolist() == [8, 9, 10]


async def test_replicas_of_unlike_contexts_share_the_shorter_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[CountingCore] = []

    class UnlikeCore(CountingCore):
        def __init__(self) -> None:
            super().__init__()
            self.info = msgspec.structs.replace(self.info, context_length=(90, 40, 60)[len(made)])
            made.append(self)

    monkeypatch.setattr(fake_core, "UnlikeCore", UnlikeCore, raising=False)
    async with pool_of("UnlikeCore", replicas=3).serving() as pool:
        assert pool.info.context_length == 40


class FlushesIdle(CountingCore):
    """Forgets prefixes once no request runs, as SGLang does."""

    async def flush_cache(self) -> None:
        while self.load().running:
            await anyio.sleep(0.5)


async def test_flush_cache_under_load_requests_are_cut_off_and_go_on() -> None:
    async with make_pool("test_pool:FlushesIdle", {"token_s": 1.0}).serving() as pool:
        answers: list[list[int]] = []

        async def keep_asking(last: int) -> None:
            answers.extend([list((await ask(pool, last, 6)).ids) for _ in range(3)])

        async with anyio.create_task_group() as tasks:
            for last in (100, 200):
                tasks.start_soon(keep_asking, last)
                await anyio.sleep(3)  # never idle at the same time
            with anyio.fail_after(2):
                await pool.flush_cache()
        assert sorted(answers) == [list(range(101, 107))] * 3 + [list(range(201, 207))] * 3
        assert pool.statistics()[0].starts == 1


class FailingCore(CountingCore):
    """Raises when its load is asked for."""

    errors: ClassVar[list[BaseException]] = []

    def load(self) -> EngineLoad:
        """Raise what there is, or say."""
        if self.errors:
            raise self.errors.pop()
        return super().load()


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3)])
async def test_core_in_process_that_raises_is_lost_and_started_again(
    error: BaseException, rollout_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool("test_pool:FailingCore", {"token_s": 1.0})
    async with pool.serving():
        FailingCore.errors.append(error)
        assert list((await ask(pool, 100, 12)).ids) == [*range(101, 113)]
        assert pool.statistics()[0].starts == 2
    assert "its core failed; it is lost" in caplog.text


def test_engines_log_at_the_level_of_their_driver(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="rollout.engine"):
        line = encode_spec(CoreSpec("m:C", {}), b"secret", with_sys_path=True)
    assert msgspec.json.decode(line, type=ChildSpec).log_level == logging.DEBUG


class RepeatingCore(CountingCore):
    """Says its last tokens but one again, in the chunk of the last one or in one of their own."""

    def __init__(self, *, overlaps: bool = False, surplus: int = 0) -> None:
        super().__init__()
        self._overlaps, self._surplus = overlaps, surplus

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        first = unpack_ids(request.prompt_ids)[-1] + 1
        stop = request.sampling.max_new_tokens + self._surplus

        def say(start: int, stop: int, reason: Any = None) -> Chunk:
            ids = range(first + start, first + stop)
            return Chunk(
                request_id=request.request_id,
                offset=start,
                ids=array("i", ids).tobytes(),
                log_probs=array("f", [-1.0] * len(ids)).tobytes(),
                finish_reason=reason,
            )

        for at in range(stop - 1):
            yield say(at, at + 1)
        await anyio.sleep(1)  # what has gathered is sent
        again = max(stop - 3, 0)
        if self._overlaps:
            yield say(again, stop, "length")
        else:
            yield say(again, stop - 1)
            yield say(stop - 1, stop, "length")


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("interval", [1, 4])
async def test_engine_says_tokens_again_beside_new_ones_none_is_lost(
    overlaps: bool, interval: int
) -> None:
    settings = ChannelSettings(stream_interval=interval)
    pool = make_pool("test_pool:RepeatingCore", {"overlaps": overlaps}, settings=settings)
    async with pool.serving():
        answer = await generate(pool, [5, 100], 6)
        assert list(answer.ids) == list(range(101, 107))
        assert answer.finish_reason == "length"


async def test_engine_answers_more_than_was_wanted_the_generation_fails_by_name() -> None:
    settings = ChannelSettings(stream_interval=16)
    pool = make_pool("test_pool:RepeatingCore", {"surplus": 3}, settings=settings)
    async with pool.serving():
        with pytest.raises(EngineError, match="at most 5 were wanted"):
            await generate(pool, [5, 100], 5)


class UnlikeCore(CountingCore):
    """Is another model than the engines that serve, or can do more."""

    def __init__(self, *, differs: str) -> None:
        super().__init__()
        if differs == "model":
            facts = {"fingerprint": "other", "context_length": 16}
            self.info = msgspec.structs.replace(self.info, **facts)
        else:
            able = msgspec.structs.replace(self.info.capabilities, expert_shape=(1, 1))
            self.info = msgspec.structs.replace(self.info, capabilities=able)


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ("model", "engine-1 serves model other"),
        ("skills", r"capabilities.expert_shape = \(1, 1\), the other engines None"),
    ],
)
async def test_replica_unlike_the_others_is_refused_and_changes_nothing(
    differs: str, said: str
) -> None:
    added = CoreSpec("test_pool:UnlikeCore", {"differs": differs})
    async with pool_of("CountingCore", make_spec=lambda slot: added).serving() as pool:
        with pytest.raises(EngineError, match=said):
            await pool.add_replica()
        assert pool.info.context_length == 4096


async def test_replica_of_no_share_is_refused_by_name() -> None:
    async with pool_of("CountingCore").serving() as pool:
        with pytest.raises(EngineError, match="load_share = 0: expected a number"):
            await pool.add_replica(load_share=0)
        assert list((await generate(pool, [5, 100], 2)).ids) == [101, 102]


async def test_add_replica_cancelled_at_any_moment_leaves_none_or_is_done() -> None:
    async with make_pool("fake_core:CountingCore", {}).serving() as pool:
        added: list[str] = []

        async def add() -> None:
            added.append(await pool.add_replica())

        for steps in range(100):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(add)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            names = [each.name for each in pool.statistics() if each.state == "serving"]
            assert names == ["engine-0", *added], steps
            if added:
                return
        raise AssertionError("it was never done")
