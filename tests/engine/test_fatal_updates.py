"""New weights that break the engines which load them; virtual time."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
import torch

import faulty_cores
import rollout
from harness import Recorder
from rollout.config import CustomEngine, InProcessPlacement, SimulatedEngine
from rollout.engine.core import SamplingParams
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.placement import CoreSpec
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.engine.routing import Router
from rollout.engine.weights import UPDATE_MODES, DiskWeights, TensorWeights
from rollout.errors import EngineError
from rollout.testing import Scenario, hold_clock

pytestmark = [pytest.mark.anyio, pytest.mark.rollout(ceiling_s=3000)]

FATAL = DiskWeights("fatal")
BROKEN = "the engine is broken: half of {} is in place"


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every core that a test starts, in order."""
    made: list[Any] = []
    real = faulty_cores.UpdatableCore

    def make(**options: Any) -> Any:
        made.append(real(**options))
        return made[-1]

    monkeypatch.setattr(faulty_cores, "UpdatableCore", make)
    yield made
    assert all(not core._aborted for core in made if core.is_closed), "requests were left"


def pool_of(replicas: int = 2, **options: Any) -> EnginePool:
    """A token a second, and seconds of loading."""
    spec = CoreSpec("faulty_cores:UpdatableCore", {"token_s": 1.0, "load_s": 2.25, **options})
    return EnginePool(
        placement=InProcess(max_read=11),
        specs=[
            attrs.evolve(spec, options={**spec.options, "index": index})
            for index in range(replicas)
        ],
        router=Router(),
        start_timeout_s=60,
    )


async def ask(
    pool: EnginePool, last: int, count: int, into: Generation | None = None
) -> Generation:
    generation = Generation() if into is None else into
    await pool.generate(
        generation,
        session_id=f"s{last}",
        prompt_ids=array("i", [5, last]).tobytes(),
        sampling=SamplingParams(max_new_tokens=count),
    )
    assert list(generation.ids) == list(range(last + 1, last + 1 + count))
    return generation


async def all_serve(pool: EnginePool) -> None:
    """After what was lost has been started again."""
    await anyio.sleep(0.25)
    while {replica.state for replica in pool.statistics()} != {"serving"}:
        await anyio.sleep(0.25)


@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize("replicas", [1, 3])
async def test_update_every_replica_breaks_of_it_the_call_raises_and_names_each(
    cores: list[Any], mode: Any, replicas: int
) -> None:
    async with pool_of(replicas).serving() as pool:
        await pool.update_weights(3, DiskWeights("w3"))
        running = [Generation() for _ in range(replicas)]
        async with anyio.create_task_group() as tasks:
            for number, generation in enumerate(running):
                tasks.start_soon(ask, pool, 100 * (number + 1), 6, generation)
            await anyio.sleep(1.5)
            with pytest.raises(EngineError) as caught:
                await pool.update_weights(8, FATAL, mode)
            for number in range(replicas):
                assert f"engine-{number}: {BROKEN.format('fatal')}" in str(caught.value)
            assert pool.weight_version == 3
            assert (await ask(pool, 900, 2)).versions == [[3, 2]]
        assert all({version for version, _ in each.versions} == {3} for each in running)
        await all_serve(pool)
        assert [core.loaded for core in cores] == [["w3"]] * replicas * 2
        assert {replica.weight_version for replica in pool.router.replicas} == {3}
        assert pool.recoveries.failed == 0


async def test_update_first_of_all_breaks_every_replica_they_serve_what_they_started_with(
    cores: list[Any],
) -> None:
    async with pool_of(2).serving() as pool:
        with pytest.raises(EngineError, match="half of fatal is in place"):
            await pool.update_weights(8, FATAL)
        assert pool.weight_version == 0
        assert (await ask(pool, 100, 2)).versions == [[0, 2]]
        await all_serve(pool)
        assert [core.loaded for core in cores] == [[]] * 4
        await pool.update_weights(9, DiskWeights("w9"))
        assert pool.weight_version == 9
        assert (await ask(pool, 200, 2)).versions == [[9, 2]]
        assert [core.loaded for core in cores[2:]] == [["w9"]] * 2


@pytest.mark.parametrize("mode", UPDATE_MODES)
async def test_update_some_break_of_it_the_others_have_it_and_those_come_back_with_it(
    cores: list[Any], mode: Any
) -> None:
    async with pool_of(2).serving() as pool:
        cores[0]._name = "fragile"
        running = [Generation() for _ in range(4)]
        async with anyio.create_task_group() as tasks:
            for number, generation in enumerate(running):
                tasks.start_soon(ask, pool, 100 * (number + 1), 8, generation)
            await anyio.sleep(1.5)
            await pool.update_weights(8, DiskWeights("odd"), mode)
            assert pool.weight_version == 8
            assert {r.weight_version for r in pool.router.replicas} == {8}
        assert all([version for version, _ in each.versions] in ([0], [0, 8]) for each in running)
        await all_serve(pool)
        assert [core.loaded for core in cores] == [[], ["odd"], ["odd"]]
        assert pool.recoveries.failed == 0


async def test_update_one_refuses_and_one_breaks_the_call_names_both(cores: list[Any]) -> None:
    async with pool_of(2).serving() as pool:
        for core in cores:
            core._name = ("fragile", "picky")[core.index]
        with pytest.raises(EngineError) as caught:
            await pool.update_weights(8, DiskWeights("odd"))
        assert f"engine-0: {BROKEN.format('odd')}" in str(caught.value)
        assert "engine-1: FileNotFoundError: no weights in odd" in str(caught.value)
        assert (await ask(pool, 100, 2)).versions == [[0, 2]]
        await all_serve(pool)
        assert [core.loaded for core in cores] == [[]] * 3


async def test_update_every_replica_dies_while_it_loads_the_call_raises(cores: list[Any]) -> None:
    """Of whatever reason: nobody has the weights."""
    async with pool_of(2).serving() as pool, anyio.create_task_group() as tasks:

        async def kill() -> None:
            await anyio.sleep(1)
            for core in cores[:2]:
                core.on_death()

        tasks.start_soon(kill)
        with pytest.raises(EngineError) as caught:
            await pool.update_weights(8, DiskWeights("w8"))
        assert "engine-0: " in str(caught.value)
        assert "engine-1: " in str(caught.value)
        assert pool.weight_version == 0
        assert (await ask(pool, 100, 2)).versions == [[0, 2]]


async def test_update_that_is_tried_again_while_none_serves_is_judged_as_well(
    cores: list[Any],
) -> None:
    """The engines that the first try broke are about to start again."""
    async with pool_of(2).serving() as pool:
        for _ in range(2):
            with pytest.raises(EngineError, match="half of fatal is in place"):
                await pool.update_weights(8, FATAL)
            assert pool.weight_version == 0
        await pool.update_weights(9, DiskWeights("w9"))
        assert (await ask(pool, 100, 2)).versions == [[9, 2]]
        await all_serve(pool)
        assert {replica.weight_version for replica in pool.router.replicas} == {9}


async def test_update_while_none_serves_returns_once_one_has_the_weights(cores: list[Any]) -> None:
    async with pool_of(1).serving() as pool:
        cores[0].on_death()
        await anyio.sleep(0.5)
        start = anyio.current_time()
        await pool.update_weights(8, DiskWeights("w8"))
        assert anyio.current_time() - start == pytest.approx(0.5 + 2.25, abs=0.1)
        assert cores[1].loaded == ["w8"]


async def test_update_in_place_breaks_the_engine_twice_its_request_is_not_blamed(
    cores: list[Any],
) -> None:
    async with pool_of(1).serving() as pool:
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, 100, 12, generation)
            for _ in range(3):
                await anyio.sleep(2.5)
                with pytest.raises(EngineError, match="half of fatal is in place"):
                    await pool.update_weights(8, FATAL, "in_place")
        assert generation.versions == [[0, 12]]
        assert pool.recoveries.failed == 0


async def test_update_too_slow_in_place_its_request_is_not_blamed(cores: list[Any]) -> None:
    async with pool_of(1).serving() as pool:
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, 100, 200, generation)
            for life in range(2):
                await anyio.sleep(2.5)
                cores[life]._load_s = 1000.0
                with pytest.raises(EngineError, match="are not loaded after"):
                    await pool.update_weights(8, DiskWeights("w8"), "in_place")
        assert generation.versions == [[0, 200]]


async def test_update_with_tensors_breaks_every_replica_the_old_files_are_loaded_again(
    cores: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "fatal"
    old.mkdir()
    new.mkdir()
    tensors = {"w": torch.ones(1)}
    async with pool_of(1, load_s=0.0).serving() as pool:
        with hold_clock():
            await pool.update_weights(8, TensorWeights(tensors, directory=str(old)))
            with pytest.raises(EngineError, match="is in place"):
                await pool.update_weights(9, TensorWeights(tensors, directory=str(new)))
        assert pool.weight_version == 8
        assert (await ask(pool, 100, 1)).versions == [[8, 1]]
        assert cores[1].loaded == cores[0].loaded
        assert (len(os.listdir(old)), len(os.listdir(new))) == (1, 0)


async def test_runtime_weights_break_every_engine_its_batch_is_of_the_old_version() -> None:
    scenario = Scenario(seed=3, timing={"base_s": 0.1}).reply("", filler=100)
    simulated = scenario.config().engine
    assert isinstance(simulated, SimulatedEngine)
    engine = CustomEngine(
        core="faulty_cores:FragileSimulation", options=dict(simulated.scenario), replicas=2
    )
    recorder = Recorder()
    config = scenario.config(engine=engine, placement=InProcessPlacement())
    async with recorder.open_rollout(config) as runtime:
        async with anyio.create_task_group() as tasks:

            async def update() -> None:
                await anyio.sleep(3)
                with pytest.raises(EngineError) as caught:
                    await runtime.update_weights(version=8, source=DiskWeights("fatal"))
                assert "engine-0: " in str(caught.value)
                assert "engine-1: " in str(caught.value)

            tasks.start_soon(update)
            prompt = rollout.Prompt(messages=[{"role": "user", "content": "hello"}], uid="p")
            batch = await runtime.generate([prompt], samples=8)
        assert runtime.engines.weight_version == 0
    assert {trajectory.outcome for trajectory in batch.trajectories} == {rollout.Outcome.COMPLETED}
    mask = batch.tensors["response_mask"].bool()
    assert set(batch.tensors["weight_versions"][mask].tolist()) == {0}
