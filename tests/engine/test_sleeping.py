"""Engines that release their memory and take it back, under requests and between batches."""

from __future__ import annotations

from typing import Any

import anyio
import attrs
import msgspec
import pytest
import torch

import rollout
from fake_core import CountingCore
from faulty_cores import UpdatableCore
from harness import Recorder
from pools import generate, make_pool
from rollout.config import LimitsConfig, RolloutConfig, SchedulingConfig, SimulatedEngine
from rollout.engine import DiskWeights, TensorWeights
from rollout.engine.core import Capabilities, EngineBroken
from rollout.engine.placement.in_process import InProcess
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.errors import ConfigError, EngineError
from rollout.limits import Clock, Deadline
from rollout.testing import Scenario
from slow_cases import slow_after

pytestmark = [pytest.mark.anyio, pytest.mark.rollout(ceiling_s=3000)]

PROMPT = rollout.Prompt(messages=[{"role": "user", "content": "hello"}], uid="p")


def config_of(**engine: Any) -> RolloutConfig:
    """Four trajectories of ten seconds on two engines."""
    scenario = Scenario(seed=3, timing={"base_s": 0.1, "slope_s": 0.0}).reply("", filler=100)
    return scenario.config(
        engine=SimulatedEngine(replicas=2, **engine),
        scheduling=SchedulingConfig(samples_per_prompt=4),
    )


def tokens_of(batch: Any) -> list[list[int]]:
    tensors = batch.tensors
    return [
        row[mask.bool()].tolist()
        for row, mask in zip(tensors["responses"], tensors["response_mask"], strict=True)
    ]


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_under_trajectories_they_go_on_where_they_were(level: int) -> None:
    recorder = Recorder()
    async with recorder.open_rollout(config_of()) as runtime:
        start = anyio.current_time()
        undisturbed = await runtime.generate([PROMPT], step=1)
        usual_s = anyio.current_time() - start
        start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_nap, runtime, level)
            batch = await runtime.generate([PROMPT], step=1)
        assert anyio.current_time() - start == pytest.approx(usual_s + 20, abs=0.5)
    assert tokens_of(batch) == tokens_of(undisturbed)
    assert [sample.outcome for sample in batch.samples] == ["completed"] * 4


async def _nap(runtime: Any, level: int) -> None:
    await anyio.sleep(3)
    await runtime.sleep(level)
    before = runtime.statistics().generated_tokens
    await anyio.sleep(10)
    await runtime.update_weights(version=8, source=DiskWeights("."))  # while they sleep
    await anyio.sleep(5)
    await runtime.wake_up(["weights"])
    await anyio.sleep(5)
    assert runtime.statistics().generated_tokens == before
    await runtime.wake_up()


@pytest.mark.parametrize(
    ("woken", "asleep"), [((), {"kv_cache", "weights"}), (("kv_cache",), {"weights"})]
)
async def test_sleep_replica_dies_or_comes_it_sleeps_too(
    woken: tuple[str, ...], asleep: set[str]
) -> None:
    recorder = Recorder()
    async with recorder.open_rollout(config_of()) as runtime:
        await runtime.sleep(2)
        await runtime.wake_up(woken)
        added = await runtime.engines.add_replica()
        core = recorder.runtimes[-1].cores[-1]
        assert core._core._asleep == asleep
        await runtime.wake_up()
        assert not core._core._asleep
        assert added == "engine-2"
        await runtime.generate([PROMPT])


@pytest.mark.parametrize(
    "operation", slow_after(1, ["update_weights", "sleep", "wake_up", "flush_cache"])
)
async def test_replica_that_is_removed_as_an_operation_begins_breaks_none(operation: str) -> None:
    async def once(offset: int) -> None:
        recorder = Recorder()
        async with recorder.open_rollout(config_of()) as runtime:
            if operation == "wake_up":
                await runtime.sleep()
            update = {"version": 3, "source": DiskWeights(".")}
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(runtime.engines.remove_replica, "engine-1")
                for _ in range(offset):
                    await anyio.lowlevel.checkpoint()
                target = runtime.engines if operation == "flush_cache" else runtime
                act = getattr(target, operation)
                await act(**update if operation == "update_weights" else {})
            if operation == "sleep":
                await runtime.wake_up()
            batch = await runtime.generate([PROMPT])
        assert [sample.outcome for sample in batch.samples] == ["completed"] * 4
        assert recorder.anomalies() == []

    for offset in range(12):
        await once(offset)


async def test_sleep_between_batches_engines_are_awake_in_batches_only() -> None:
    recorder = Recorder()

    def asleep() -> list[bool]:
        return [bool(core._core._asleep) for core in recorder.runtimes[-1].cores]

    async with recorder.open_rollout(config_of(sleep_between_batches=True)) as runtime:
        assert asleep() == [True, True]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.generate, [PROMPT])
            await anyio.sleep(2)
            assert asleep() == [False, False]
            tasks.start_soon(runtime.generate, [PROMPT])  # the first to end leaves them awake
        assert asleep() == [True, True]
        with anyio.move_on_after(1) as scope:
            await runtime.generate([PROMPT])
        assert scope.cancelled_caught
        assert asleep() == [True, True]
        async with runtime.stream([PROMPT]) as trajectories:
            assert asleep() == [False, False]
            await trajectories.receive()
        assert asleep() == [True, True]
        await runtime.update_weights(version=8, source=DiskWeights("."))
        batch = await runtime.generate([PROMPT])
        versions = batch.tensors["weight_versions"]
        assert set(versions.flatten().tolist()) == {-1, 8}
        with pytest.raises(ZeroDivisionError):
            async with runtime.stream([PROMPT]):
                _ = 1 / 0
        assert asleep() == [True, True]


async def test_sleep_wrong_argument_engines_stay_awake() -> None:
    recorder = Recorder()
    async with recorder.open_rollout(config_of()) as runtime:
        for level in (3, "1"):
            with pytest.raises(EngineError) as caught:
                await runtime.sleep(level)  # type: ignore[arg-type]
            assert str(caught.value) == f"level = {level!r}; expected 1 or 2"
        with pytest.raises(EngineError, match=r"^tags = None; expected some of kv_cache, weights$"):
            await runtime.wake_up(None)  # type: ignore[arg-type]
        with pytest.raises(EngineError, match=r"^tags: 'kv'; expected kv_cache, weights$"):
            await runtime.wake_up(["kv"])
        await runtime.flush_cache()
        await runtime.generate([PROMPT])


def test_config_servers_of_others_do_not_sleep() -> None:
    with pytest.raises(ConfigError) as caught:
        rollout.config.HttpEngine(urls=("http://a",), sleep_between_batches=True)
    assert "expected false: servers that somebody else runs keep their memory" in str(caught.value)


@pytest.mark.parametrize("limit", ["generation_s", "turn_s", "trajectory_s", "batch_s"])
async def test_sleep_counts_for_the_batch_only(limit: str) -> None:
    """Ten seconds of work within twelve, and a minute of sleep, which only `batch_s` counts."""
    limits = dict.fromkeys(("generation_s", "turn_s", "trajectory_s", "batch_s"), 100.0)
    limits["tool_s"] = 1.0
    for name in limits:
        limits[name] = min(limits[name], 12.0)
        if name == limit:
            break
    recorder = Recorder()
    config = attrs.evolve(config_of(), limits=LimitsConfig(**limits))
    async with recorder.open_rollout(config) as runtime:
        start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_sleep_a_minute, runtime)
            batch = await runtime.generate([PROMPT])
        took_s = anyio.current_time() - start
    sources = {(sample.outcome, sample.limit_source) for sample in batch.samples}
    if limit == "batch_s":
        assert sources == {("deadline", "limits.batch_s")}
        assert 20 < sum(len(row) for row in tokens_of(batch)) / 4 < 40
    else:
        assert sources == {("completed", None)}
        assert 70 < took_s < 72


async def _sleep_a_minute(runtime: Any) -> None:
    await anyio.sleep(3)
    await runtime.sleep()
    await anyio.sleep(60)
    await runtime.wake_up()


async def test_sleep_is_over_the_limit_counts_on_from_where_it_stood() -> None:
    limits = LimitsConfig(generation_s=7.0, turn_s=100.0, tool_s=1.0, trajectory_s=100.0)
    recorder = Recorder()
    async with recorder.open_rollout(attrs.evolve(config_of(), limits=limits)) as runtime:
        start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_sleep_a_minute, runtime)
            batch = await runtime.generate([PROMPT])
        assert anyio.current_time() - start == pytest.approx(67, abs=0.3)
    assert {s.limit_source for s in batch.samples} == {"limits.generation_s"}


# Engines that sleep otherwise than they are told.


def pool_of(core: str, placement: InProcess | None = None, **options: Any) -> EnginePool:
    return make_pool(core, options, placement=placement)


async def ask(
    pool: EnginePool, last: int, count: int, generation: Generation | None = None
) -> list[int]:
    return list((await generate(pool, [5, last], count, generation)).ids)


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
    pool, weights = pool_of("test_sleeping:ModestCore", token_s=1.0), DiskWeights("any")
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
    async with pool_of("test_sleeping:ModestCore").serving() as pool:
        await pool.sleep(2)
        with pytest.raises(
            EngineError, match=r"'weights'.*: counting takes back nothing by itself"
        ):
            await pool.wake_up(("weights",))
        await pool.wake_up()
        await pool.update_weights(version=1, source=weights)
        assert pool.weight_version == 1


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


async def test_weights_change_while_a_new_replica_goes_to_sleep_it_has_them() -> None:
    async with pool_of("test_sleeping:SlowSleeperCore").serving() as pool:
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
    cores: dict[str, Any] = {}

    def keep(name: str, core: Any) -> Any:
        cores[name] = core
        return core

    pool = make_pool(
        "test_sleeping:StubbornCore",
        {"sleep_s": 1.0},
        {"sleep_s": 0.0},
        placement=InProcess(wrap=keep),
        start_timeout_s=60,
    )
    async with pool.serving():
        with pytest.raises(EngineError, match="too busy"):
            await pool.sleep()
        await anyio.sleep(30)
        assert [(each.state, each.starts) for each in pool.statistics()] == [
            ("serving", 2),
            ("serving", 1),
        ]
        assert not any(each.is_asleep for each in cores.values())


async def test_update_waits_for_requests_that_sleep_it_is_refused() -> None:
    answers: list[list[int]] = []

    async def keep_asking(pool: EnginePool) -> None:
        answers.append(await ask(pool, 100, 9))

    async with pool_of("test_sleeping:SlowSleeperCore", token_s=1.0).serving() as pool:
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


class BreaksAwakening(CountingCore):
    """Breaks when it is woken."""

    async def sleep(self, level: int) -> None:
        """Be asleep."""

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        raise EngineBroken("the memory is gone")


async def test_wake_up_breaks_the_engine_its_caller_is_told() -> None:
    async with pool_of("test_sleeping:BreaksAwakening", token_s=1.0).serving() as pool:
        await pool.sleep()
        with pytest.raises(EngineError, match=r"engine-0.*the memory is gone"):
            await pool.wake_up()
        assert await ask(pool, 100, 3) == [101, 102, 103]


async def test_update_while_asleep_leaves_the_clocks_of_requests_stopped() -> None:
    async with pool_of("test_sleeping:SlowSleeperCore", token_s=1.0).serving() as pool:

        async def sleep_and_update() -> None:
            await anyio.sleep(3)
            await pool.sleep(1)
            await pool.update_weights(version=1, source=DiskWeights("any"))
            await anyio.sleep(60)
            await pool.wake_up()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sleep_and_update)
            with Clock(Deadline.after(20, "limits.trajectory_s")) as clock:
                answer = await generate(pool, [5, 100], 10, limit=clock)
        assert list(answer.ids) == list(range(101, 111))
