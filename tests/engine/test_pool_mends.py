"""Faults of the pool that were found by reading; virtual time where time matters."""

from __future__ import annotations

import logging
import os
import threading
import time  # noqa: TID251  (what is measured here is CPU time)
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import anyio
import attrs
import msgspec
import pytest
import torch

from fake_core import CountingCore
from faulty_cores import MortalCore, UpdatableCore
from pools import generate, make_pool
from rollout.engine.channel.child import ChildSpec
from rollout.engine.channel.framing import FrameStream
from rollout.engine.core import Capabilities, Chunk, EngineBroken, EngineLoad
from rollout.engine.placement import ray as ray_placement
from rollout.engine.placement.engine_process import encode_spec
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.placement import CoreSpec, ReplicaHandle
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.engine.weights import DiskWeights, TensorWeights
from rollout.errors import EngineError

pytestmark = [pytest.mark.anyio, pytest.mark.rollout(ceiling_s=3000)]


class TiredCore(CountingCore):
    """Neither goes to sleep nor wakes up."""

    async def sleep(self, level: int) -> None:
        raise RuntimeError("no memory saver")

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        await anyio.sleep_forever()

    async def flush_cache(self) -> None:
        """Nothing to forget."""


class HalfLoadedCore(UpdatableCore):
    """Computes with weights of which only a part has come."""

    async def update_weights(self, version: int, source: DiskWeights) -> None:
        self.version = version
        raise RuntimeError("the link broke")


def pool_of(core: str, placement: InProcess | None = None, **options: Any) -> EnginePool:
    return make_pool(core, options, placement=placement)


async def ask(
    pool: EnginePool, last: int, count: int, generation: Generation | None = None
) -> list[int]:
    return list((await generate(pool, [5, last], count, generation)).ids)


async def test_sleep_fails_and_the_wake_up_hangs_requests_go_on() -> None:
    async with pool_of("test_pool_mends:TiredCore", token_s=1.0).serving() as pool:
        with pytest.raises(EngineError, match=r"no memory saver|no answer after"):
            await pool.sleep()
        with anyio.fail_after(60):
            assert await ask(pool, 100, 3) == [101, 102, 103]


class ModestCore(UpdatableCore):
    """Says that it can do less than there is to ask for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        able = Capabilities(weights=("disk",), sleep_levels=(2,))
        self.info = msgspec.structs.replace(self.info, capabilities=able)

    async def sleep(self, level: int) -> None:
        """Nothing to release."""

    wake_up = sleep  # type: ignore[assignment]


async def test_what_an_engine_does_not_say_it_can_is_refused_before_requests_are_cut_off() -> None:
    pool, weights = pool_of("test_pool_mends:ModestCore", token_s=1.0), DiskWeights("any")
    async with pool.serving(), anyio.create_task_group() as tasks:
        tasks.start_soon(generate, pool, [5, 100], 5)
        await anyio.sleep(2)
        with pytest.raises(EngineError, match=r"engine-0: level = 1: counting has 2$"):
            await pool.sleep(1)
        with pytest.raises(EngineError, match=r"'tensors'; it takes disk$"):
            await pool.update_weights(version=1, source=TensorWeights({"a": torch.ones(1)}))
        with pytest.raises(EngineError, match="mode = 'in_place': counting cannot"):
            await pool.update_weights(version=1, source=weights, mode="in_place")
        (attempt,) = pool._requests.active
        assert not attempt.is_interrupted
    async with pool_of("test_pool_mends:ModestCore").serving() as pool:
        await pool.sleep(2)
        with pytest.raises(
            EngineError, match=r"'weights'.*: counting takes back nothing by itself"
        ):
            await pool.wake_up(("weights",))
        await pool.wake_up()
        await pool.update_weights(version=1, source=weights)
        assert pool.weight_version == 1


class FlushesIdle(CountingCore):
    """Forgets prefixes once no request runs, as SGLang does."""

    async def flush_cache(self) -> None:
        while self.load().running:
            await anyio.sleep(0.5)


async def test_flush_cache_under_load_requests_are_cut_off_and_go_on() -> None:
    async with pool_of("test_pool_mends:FlushesIdle", token_s=1.0).serving() as pool:
        answers: list[list[int]] = []

        async def keep_asking(last: int) -> None:
            answers.extend([await ask(pool, last, 6) for _ in range(3)])

        async with anyio.create_task_group() as tasks:
            for last in (100, 200):
                tasks.start_soon(keep_asking, last)
                await anyio.sleep(3)  # never idle at the same time
            with anyio.fail_after(2):
                await pool.flush_cache()
        assert sorted(answers) == [list(range(101, 107))] * 3 + [list(range(201, 207))] * 3
        assert pool.statistics()[0].starts == 1


class SlowSleeperCore(UpdatableCore):
    """Takes a while to release its memory."""

    def __init__(self, *, sleep_s: float = 3.0, **options: Any) -> None:
        super().__init__(**options)
        self.is_asleep, self._sleep_s = False, sleep_s

    async def sleep(self, level: int) -> None:
        await anyio.sleep(self._sleep_s)
        self.is_asleep = True

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        self.is_asleep = False


class CuttableInProcess(InProcess):
    """Keeps the driver's end of each replica's last connection, and its core."""

    def __init__(self) -> None:
        self.cores: dict[str, Any] = {}
        self.streams: dict[str, Any] = {}
        super().__init__(latency_s=0.5, wrap=self._note_core)

    def _note_core(self, name: str, core: Any) -> Any:
        self.cores[name] = core
        return core

    @asynccontextmanager
    async def open_replica(
        self, name: str, spec: CoreSpec, start_timeout_s: float
    ) -> AsyncIterator[ReplicaHandle]:
        async with super().open_replica(name, spec, start_timeout_s) as handle:

            async def connect() -> Any:
                stream = self.streams[name] = await handle.connect()
                return stream

            yield attrs.evolve(handle, connect=connect)


async def test_connection_breaks_while_a_replica_is_put_to_sleep_it_does_not_serve_asleep() -> None:
    core, placement = "test_pool_mends:SlowSleeperCore", CuttableInProcess()
    options = [{"sleep_s": seconds} for seconds in (1.5, 0.0)]
    pool = make_pool(core, *options, placement=placement, start_timeout_s=60)
    async with pool.serving():
        placement.streams["engine-0"].cut()
        await anyio.sleep(0.1)
        await pool.sleep()
        await anyio.sleep(1.3)  # it has come back, and is being put to sleep
        assert [each.state for each in pool.statistics()] == ["lost", "serving"]
        placement.streams["engine-0"].cut()
        await pool.wake_up()
        await anyio.sleep(30)
        assert [each.state for each in pool.statistics()] == ["serving"] * 2
        assert not any(each.is_asleep for each in placement.cores.values())


async def test_weights_change_while_a_new_replica_goes_to_sleep_it_has_them() -> None:
    async with pool_of("test_pool_mends:SlowSleeperCore").serving() as pool:
        await pool.sleep(2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.add_replica)
            await anyio.sleep(1)  # it has the weights of before, and is being put to sleep
            await pool.update_weights(9, DiskWeights("w9"))
        await pool.wake_up()
        generations = [Generation() for _ in range(4)]
        for last, generation in enumerate(generations):
            await ask(pool, last, 2, generation)
    assert [each.versions for each in generations] == [[[9, 2]]] * 4
    assert {each.replica for each in generations} == {"engine-0", "engine-1"}


class StubbornCore(SlowSleeperCore):
    """Does not wake up once it sleeps; without `sleep_s` it does not even go to sleep."""

    async def sleep(self, level: int) -> None:
        if not self._sleep_s:
            raise EngineError("too busy")
        await super().sleep(level)

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        raise EngineError("five more minutes")


async def test_sleep_fails_and_one_that_sleeps_does_not_wake_it_is_restarted() -> None:
    core, placement = "test_pool_mends:StubbornCore", CuttableInProcess()
    options = [{"sleep_s": seconds} for seconds in (1.0, 0.0)]
    pool = make_pool(core, *options, placement=placement, start_timeout_s=60)
    async with pool.serving():
        with pytest.raises(EngineError, match="too busy"):
            await pool.sleep()
        await anyio.sleep(30)
        assert [(each.state, each.starts) for each in pool.statistics()] == [
            ("serving", 2),
            ("serving", 1),
        ]
        assert not any(each.is_asleep for each in placement.cores.values())


async def test_replica_that_joins_sleeping_engines_and_does_not_fall_asleep_is_not_waited_for() -> (
    None
):
    core = "test_pool_mends:SlowSleeperCore"
    added = CoreSpec(core, {"sleep_s": 1e6})
    pool = make_pool(core, {"sleep_s": 0.0}, make_spec=lambda slot: added, start_timeout_s=60)
    async with pool.serving():
        await pool.sleep()
        with pytest.raises(EngineError, match=r"engine-1: no answer after engine.start_timeout_s"):
            await pool.add_replica()
        assert anyio.current_time() < 100


async def test_update_waits_for_requests_that_sleep_it_is_refused() -> None:
    answers: list[list[int]] = []

    async def keep_asking(pool: EnginePool) -> None:
        answers.append(await ask(pool, 100, 9))

    async with pool_of("test_pool_mends:SlowSleeperCore", token_s=1.0).serving() as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_asking, pool)
            await anyio.sleep(2)
            await pool.sleep()
            with anyio.fail_after(60):
                with pytest.raises(EngineError, match=r"mode = 'wait': engine-0 sleeps with"):
                    await pool.update_weights(8, DiskWeights("w8"), "wait")
                await pool.update_weights(8, DiskWeights("w8"))
                await pool.wake_up()
    assert answers == [list(range(101, 110))]


class BreaksAwakening(TiredCore):
    """Breaks when it is woken."""

    async def sleep(self, level: int) -> None:
        """Be asleep."""

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        raise EngineBroken("the memory is gone")


async def test_wake_up_breaks_the_engine_its_caller_is_told() -> None:
    async with pool_of("test_pool_mends:BreaksAwakening", token_s=1.0).serving() as pool:
        await pool.sleep()
        with pytest.raises(EngineError, match=r"engine-0.*the memory is gone"):
            await pool.wake_up()
        assert await ask(pool, 100, 3) == [101, 102, 103]


async def test_update_whose_caller_left_fails_the_log_has_its_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = pool_of("faulty_cores:UpdatableCore", token_s=1.0, load_s=4.0)
    async with pool.serving():
        with anyio.move_on_after(1):
            await pool.update_weights(1, DiskWeights("bad"))
        await anyio.sleep(10)
    told = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert any("caller was cancelled" in text and "no weights in bad" in text for text in told)


async def test_update_raises_of_no_kind_the_replica_is_restarted_with_the_old_weights() -> None:
    async with pool_of("test_pool_mends:HalfLoadedCore", token_s=1.0).serving() as pool:
        with pytest.raises(EngineError, match="the link broke"):
            await pool.update_weights(8, DiskWeights("w8"))
        generation = Generation()
        await ask(pool, 100, 2, generation)
        assert generation.versions == [[0, 2]]
        assert pool.statistics()[0].starts == 2


async def test_request_that_only_waits_to_be_sent_is_not_blamed_for_engines_that_die(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores: list[MortalCore] = []

    def note(name: str, core: Any) -> Any:
        cores.append(core)
        return core

    async def wait(frames: FrameStream) -> None:
        await anyio.sleep(1.0 if len(cores) < 6 else 0.0)

    pool = pool_of("faulty_cores:MortalCore", placement=InProcess(wrap=note))
    async with pool.serving(), anyio.create_task_group() as tasks:
        monkeypatch.setattr(FrameStream, "wait_for_room", wait)
        answers: list[list[int]] = []

        async def generate() -> None:
            answers.append(await ask(pool, 100, 3))

        tasks.start_soon(generate)
        while not answers:
            if len(cores) < 6 and pool.statistics()[0].in_flight:
                await anyio.sleep(0.5)
                cores[-1].on_death()
            await anyio.sleep(0.1)
    assert (len(cores), answers) == (6, [[101, 102, 103]])
    assert pool.recoveries.failed == 0


class FailingCore(CountingCore):
    """Raises when its load is asked for."""

    errors: ClassVar[list[BaseException]] = []

    def load(self) -> EngineLoad:
        """Raise what there is, or say."""
        if self.errors:
            raise self.errors.pop()
        return super().load()


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3), BaseException("boom")])
async def test_core_in_process_that_raises_is_lost_and_started_again(
    error: BaseException, rollout_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of(f"{__name__}:FailingCore", token_s=1.0)
    async with pool.serving():
        FailingCore.errors.append(error)
        assert await ask(pool, 100, 12) == [*range(101, 113)]
        assert pool.statistics()[0].starts == 2
    assert "its core failed; it is lost" in caplog.text


def test_engines_log_at_the_level_of_their_driver(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="rollout.engine"):
        line = encode_spec(CoreSpec("m:C", {}), b"secret", with_sys_path=True)
    assert msgspec.json.decode(line, type=ChildSpec).log_level == logging.DEBUG


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # a real thread takes real time
async def test_ray_is_imported_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def refuse() -> Any:
        threads.append(threading.get_ident())
        raise EngineError("no Ray here")

    monkeypatch.setattr(ray_placement, "import_ray", refuse)
    with pytest.raises(EngineError, match="no Ray here"):
        async with ray_placement.open_ray_actors(address=None, python=None, resources={}):
            pytest.fail("opened")
    assert threads != [threading.get_ident()]


def test_generation_takes_many_chunks_in_time_that_grows_with_their_number() -> None:
    def seconds(chunks: int) -> float:
        generation = Generation()
        generation.top_count = 20
        ids, tops = bytes(4 * 16), bytes(4 * 16 * 20)
        begin = time.process_time()
        for number in range(chunks):
            generation.append(
                Chunk(
                    request_id="r",
                    offset=16 * number,
                    ids=ids,
                    log_probs=ids,
                    top_ids=tops,
                    top_log_probs=tops,
                )
            )
        took = time.process_time() - begin
        assert generation.top() is not None
        return took

    # Quadratic work takes 100 times longer; a neighbour on the machine may disturb some of these.
    assert any(seconds(5000) < 25 * seconds(500) for _ in range(5))


def test_gpu_slots_of_workers_with_one_gpu_each_make_replicas_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = SimpleNamespace(get=list)
    monkeypatch.setattr(ray_placement, "import_ray", lambda: ray)
    places = ["a:0", "a:1", "b:0", "b:1"]
    workers = [
        SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda _, place=place: place))
        for place in places
    ]
    assert ray_placement.gpu_slots_of(workers) == tuple(places)
    assert ray_placement.gpu_slots_of(workers, gpus_per_replica=2) == ("a:0,1", "b:0,1")
    with pytest.raises(EngineError, match="4 workers; expected a multiple of"):
        ray_placement.gpu_slots_of(workers, gpus_per_replica=3)
    with pytest.raises(EngineError, match="several machines"):
        ray_placement.gpu_slots_of([*workers[1:3], *workers[:2]], gpus_per_replica=2)


def test_stage_leaves_weights_of_another_container_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from rollout.engine.weights import stage

    weights = TensorWeights({"a": torch.zeros(2)}, directory=str(tmp_path))
    real = os.stat
    with monkeypatch.context() as elsewhere:  # another namespace, where this number is somebody's
        elsewhere.setattr(os, "getpid", lambda: 2**22 + 1)
        other = SimpleNamespace(st_ino=7)
        elsewhere.setattr(
            os,
            "stat",
            lambda path, **how: other if str(path).endswith("/ns/pid") else real(path, **how),
        )
        theirs = stage(weights)
    ours = stage(weights)
    assert Path(theirs).exists()
    assert Path(ours).exists()
