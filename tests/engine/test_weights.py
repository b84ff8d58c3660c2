"""New weights under requests that run: every mode and what may happen meanwhile; virtual time."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
import torch

import rollout
from faulty_cores import UpdatableCore
from harness import Recorder
from pools import generate, make_pool
from rollout.config import SchedulingConfig, SimulatedEngine
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.placement import CoreSpec, ReplicaHandle
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.engine.weights import UPDATE_MODES, DiskWeights, DistributedWeights, TensorWeights
from rollout.errors import EngineError
from rollout.testing import Scenario, hold_clock

pytestmark = [pytest.mark.anyio, pytest.mark.rollout(ceiling_s=3000)]

W8 = DiskWeights("w8")
FATAL = DiskWeights("fatal")
#: What engines say that refuse weights, and that break of them.
REFUSED, BROKEN = (
    "FileNotFoundError: no weights in {}",
    "the engine is broken: half of {} is in place",
)


def pool_of(
    replicas: int = 2, placement: InProcess | None = None, load_s: float = 2.25, **options: Any
) -> EnginePool:
    """A token a second, and seconds of loading."""
    cores = [{"token_s": 1.0, "load_s": load_s, "index": index} for index in range(replicas)]
    placement = placement or InProcess(max_read=11)
    return make_pool("faulty_cores:UpdatableCore", *cores, placement=placement, **options)


async def ask(
    pool: EnginePool, last: int, count: int, into: Generation | None = None, **asked: Any
) -> Generation:
    """A generation, which says what one undisturbed request would have said."""
    generation = await generate(pool, [5, last], count, into, **asked)
    assert list(generation.ids) == list(range(last + 1, last + 1 + count))
    assert sum(tokens for _, tokens in generation.versions) == count
    return generation


async def all_serve(pool: EnginePool) -> None:
    """After what was lost has been started again."""
    await anyio.sleep(0.25)
    while {replica.state for replica in pool.statistics()} != {"serving"}:
        await anyio.sleep(0.25)


def version_runs(generations: list[Generation]) -> list[list[int]]:
    return [[version for version, _ in each.versions] for each in generations]


async def comes_back(pool: EnginePool) -> None:
    """One of them has been started a second time."""
    while sum(replica.starts for replica in pool.statistics()) < 3:
        await anyio.sleep(0.5)


@pytest.mark.parametrize(
    ("mode", "versions", "done_s"),
    [
        ("wait", [[0, 6]], 6 + 2.25),
        ("abort_and_resume", [[0, 2], [8, 4]], 2.5 + 2.25),
        ("in_place", [[0, 4], [8, 2]], 2.5 + 2.25),
    ],
)
async def test_update_every_token_has_the_version_that_sampled_it(
    cores: list[Any], mode: Any, versions: list[list[int]], done_s: float
) -> None:
    async with pool_of(1).serving() as pool:
        running, late = Generation(), Generation()
        start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, 100, 6, running)
            await anyio.sleep(2.5)
            tasks.start_soon(pool.update_weights, 8, W8, mode)
            await anyio.sleep(0.25)
            tasks.start_soon(ask, pool, 200, 2, late)
            while not late.ids:
                await anyio.sleep(0.01)
            assert anyio.current_time() - start == pytest.approx(done_s + 1, abs=0.05)
        assert running.versions == versions
        assert late.versions == [[8, 2]]
        assert len(running.parts) == 1
        assert (running.resumes, running.restarts) == (0, ())


async def test_update_requests_that_are_cut_off_stay_with_their_replicas(cores: list[Any]) -> None:
    async with pool_of(3).serving() as pool:
        for core, load_s in zip(cores, (0.5, 2.0, 4.0), strict=True):
            core._load_s = load_s
        running = [Generation() for _ in range(9)]
        async with anyio.create_task_group() as tasks:
            for number, generation in enumerate(running):
                tasks.start_soon(ask, pool, 100 * (number + 1), 8, generation)
            await anyio.sleep(2.5)
            await pool.update_weights(8, W8)
            assert [r.in_flight for r in pool.statistics()] == [3, 3, 3]
        assert version_runs(running) == [[0, 8]] * 9
        assert [len(each.parts) for each in running] == [1] * 9
        assert [r.served for r in pool.router.statistics().replicas] == [3, 3, 3]


@pytest.mark.parametrize("mode", UPDATE_MODES)
async def test_update_engine_dies_while_it_loads_it_comes_back_with_the_new_ones(
    cores: list[Any], mode: Any
) -> None:
    async with pool_of(2).serving() as pool:
        generations = [Generation() for _ in range(4)]
        async with anyio.create_task_group() as tasks:
            for number, generation in enumerate(generations):
                tasks.start_soon(ask, pool, 100 * (number + 1), 5, generation)
            await anyio.sleep(1.5)
            tasks.start_soon(pool.update_weights, 8, W8, mode)
            await anyio.sleep(5.0 if mode == "wait" else 1.0)
            cores[0].on_death()
        assert all(versions in ([0], [0, 8]) for versions in version_runs(generations))
        await comes_back(pool)
        assert [core.loaded for core in cores] == [[], ["w8"], ["w8"]]
        assert {r.weight_version for r in pool.router.replicas} == {8}


@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize("how", ["picky", "fragile"])
async def test_update_one_refuses_or_breaks_of_it_it_serves_again_once_it_has_them(
    cores: list[Any], mode: Any, how: str
) -> None:
    async with pool_of(2, start_timeout_s=60).serving() as pool:
        cores[0]._name = how
        running = [Generation() for _ in range(4)]
        async with anyio.create_task_group() as tasks:
            for number, generation in enumerate(running):
                tasks.start_soon(ask, pool, 100 * (number + 1), 8, generation)
            await anyio.sleep(1.5)
            await pool.update_weights(8, DiskWeights("odd"), mode)
            assert pool.weight_version == 8
        assert all(versions in ([0], [0, 8]) for versions in version_runs(running))
        await comes_back(pool)
        assert [core.loaded for core in cores] == [[], ["odd"], ["odd"]]
        assert pool.recoveries.failed == 0


@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize(("name", "said", "starts"), [("bad", REFUSED, 1), ("fatal", BROKEN, 2)])
async def test_update_no_replica_can_load_the_call_names_each_and_all_have_the_old_ones(
    cores: list[Any], mode: Any, name: str, said: str, starts: int
) -> None:
    async with pool_of(3, start_timeout_s=60).serving() as pool:
        await pool.update_weights(3, DiskWeights("w3"))
        running = [Generation() for _ in range(3)]
        async with anyio.create_task_group() as tasks:
            for number, generation in enumerate(running):
                tasks.start_soon(ask, pool, 100 * (number + 1), 6, generation)
            await anyio.sleep(1.5)
            with pytest.raises(EngineError) as caught:
                await pool.update_weights(8, DiskWeights(name), mode)
            for number in range(3):
                assert f"engine-{number}: {said.format(name)}" in str(caught.value)
            assert pool.weight_version == 3
            assert (await ask(pool, 900, 2)).versions == [[3, 2]]
        assert version_runs(running) == [[3]] * 3
        await all_serve(pool)
        assert [core.loaded for core in cores] == [["w3"]] * 3 * starts
        assert {replica.weight_version for replica in pool.router.replicas} == {3}
        assert pool.recoveries.failed == 0


@pytest.mark.parametrize("mode", UPDATE_MODES)
async def test_update_request_cancelled_meanwhile_keeps_its_tokens(
    cores: list[Any], mode: Any
) -> None:
    async with pool_of(1).serving() as pool:
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            with anyio.move_on_after(3.5):
                tasks.start_soon(_update_at, 2.5, pool, mode)
                await ask(pool, 100, 50, generation)
        assert list(generation.ids)[:2] == [101, 102]
        assert {version for version, _ in generation.versions} == {0}
        after = Generation()
        await ask(pool, 200, 1, after)
        assert after.versions == [[8, 1]]
        assert [(r.in_flight, r.zombies) for r in pool.statistics()] == [(0, 0)]


async def _update_at(seconds: float, pool: EnginePool, mode: Any) -> None:
    await anyio.sleep(seconds)
    await pool.update_weights(8, W8, mode)


async def test_update_too_slow_the_engine_is_started_again_since_nobody_knows_what_it_has(
    cores: list[Any],
) -> None:
    async with pool_of(1).serving() as pool:
        cores[0]._load_s = 100.0
        with pytest.raises(EngineError) as caught:
            await pool.update_weights(8, W8)
        assert str(caught.value) == (
            "engine-0: the weights of version 8 are not loaded after engine.start_timeout_s = 5 s"
        )
        generation = Generation()
        await ask(pool, 100, 2, generation)
        assert generation.versions == [[0, 2]]
        assert [r.starts for r in pool.statistics()] == [2]


async def test_update_to_the_same_version_nothing_runs_before_they_are_loaded(
    cores: list[Any],
) -> None:
    async with pool_of(1).serving() as pool:
        await pool.update_weights(8, W8)
        start, generation = anyio.current_time(), Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.update_weights, 8, DiskWeights("again"))
            await anyio.sleep(0.5)
            await ask(pool, 100, 1, generation)
        assert anyio.current_time() - start == pytest.approx(2.25 + 1.0, abs=0.05)
        assert cores[0].loaded == ["w8", "again"]


async def test_update_abort_is_lost_it_is_sent_again(
    cores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_of(1).serving() as pool:
        real, asked = cores[0].abort_nowait, []

        def deaf_once(request_id: str) -> None:
            asked.append(request_id)
            if len(asked) > 1:
                real(request_id)

        monkeypatch.setattr(cores[0], "abort_nowait", deaf_once)
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, 100, 6, generation)
            await anyio.sleep(1.5)
            await pool.update_weights(8, W8)
        assert generation.versions == [[0, 2], [8, 4]]


async def test_update_with_state_beyond_the_tokens_begins_anew_and_says_so(
    cores: list[Any],
) -> None:
    async with pool_of(1).serving() as pool:
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: ask(pool, 100, 4, generation, presence_penalty=0.5))
            await anyio.sleep(2.5)
            await pool.update_weights(8, W8)
        assert generation.versions == [[8, 4]]
        assert generation.restarts == ("it was interrupted (sampling.presence_penalty)",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, W8, "now"), "mode = 'now'; expected wait, abort_and_resume, in_place"),
        ((-1, W8), "version = -1; expected 0 to 2**31 - 1"),
        (("8", W8), "version = '8'; expected 0 to 2**31 - 1"),
        (
            (8, "/x"),
            "source = '/x'; expected DiskWeights, TensorWeights or DistributedWeights",
        ),
        (
            (8, DiskWeights(5)),
            "source = DiskWeights(path=5); Expected `str`, got `int` - at `$[1]`",
        ),
    ],
)
async def test_update_wrong_argument_nothing_changes(
    cores: list[Any], arguments: Any, message: str
) -> None:
    async with pool_of(1).serving() as pool:
        with pytest.raises(EngineError) as caught:
            await pool.update_weights(*arguments)
        assert str(caught.value) == message
        assert cores[0].loaded == []
        await pool.update_weights(9, DiskWeights(Path("weights-9")))  # type: ignore[arg-type]
        assert cores[0].loaded == ["weights-9"]


class Elsewhere(InProcess):
    """As if the engines were not on the driver's machine, or each on several."""

    machines = 1
    is_here = False

    @asynccontextmanager
    async def open_replica(
        self, name: str, spec: CoreSpec, start_timeout_s: float
    ) -> AsyncIterator[ReplicaHandle]:
        async with super().open_replica(name, spec, start_timeout_s) as handle:
            yield attrs.evolve(handle, machines=self.machines, is_here=self.is_here)


@pytest.mark.parametrize(
    ("machines", "source", "where"),
    [
        (1, TensorWeights({}, directory="/nowhere"), "on another machine than the driver"),
        (
            2,
            DistributedWeights(
                host="10.0.0.1", port=1, world_size=2, names=(), dtypes=(), shapes=()
            ),
            "spread over 2 machines",
        ),
    ],
)
async def test_update_that_does_not_reach_a_replica_is_refused_before_anything_is_copied(
    cores: list[Any], machines: int, source: Any, where: str
) -> None:
    placement = Elsewhere()
    placement.machines = machines
    async with pool_of(1, placement=placement).serving() as pool:
        with pytest.raises(EngineError) as caught:
            await pool.update_weights(8, source)
        assert str(caught.value) == (
            f"engine-0 is {where}, where {type(source).__name__} do not reach; "
            "expected DiskWeights in a directory that every machine sees"
        )
        await pool.update_weights(8, W8)
        assert cores[0].loaded == ["w8"]


# Weights that break the engines which load them.


async def test_update_breaks_every_replica_they_serve_what_they_started_with_and_take_the_next(
    cores: list[Any],
) -> None:
    async with pool_of(2, start_timeout_s=60).serving() as pool:
        for _ in range(2):  # the second time while none serves
            with pytest.raises(EngineError, match="half of fatal is in place"):
                await pool.update_weights(8, FATAL)
            assert pool.weight_version == 0
        assert (await ask(pool, 100, 2)).versions == [[0, 2]]
        await all_serve(pool)
        await pool.update_weights(9, DiskWeights("w9"))
        assert pool.weight_version == 9
        assert (await ask(pool, 200, 2)).versions == [[9, 2]]
        assert {replica.weight_version for replica in pool.router.replicas} == {9}


async def test_update_while_none_serves_returns_once_one_has_the_weights(cores: list[Any]) -> None:
    async with pool_of(1, start_timeout_s=60).serving() as pool:
        cores[0].on_death()
        await anyio.sleep(0.5)
        start = anyio.current_time()
        await pool.update_weights(8, DiskWeights("w8"))
        assert anyio.current_time() - start == pytest.approx(0.5 + 2.25, abs=0.1)
        assert cores[1].loaded == ["w8"]


async def test_update_in_place_breaks_the_engine_thrice_its_request_is_not_blamed(
    cores: list[Any],
) -> None:
    async with pool_of(1, start_timeout_s=60).serving() as pool:
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, 100, 300, generation)
            for _ in range(3):
                await anyio.sleep(2.5)
                await all_serve(pool)
                with pytest.raises(EngineError, match="half of fatal is in place"):
                    await pool.update_weights(8, FATAL, "in_place")
            assert generation.finish_reason is None
        assert generation.versions == [[0, 300]]
        assert pool.recoveries.failed == 0


async def test_update_with_tensors_breaks_every_replica_the_old_files_are_loaded_again(
    cores: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "fatal"
    old.mkdir()
    new.mkdir()
    tensors = {"w": torch.ones(1)}
    async with pool_of(1, load_s=0.0, start_timeout_s=60).serving() as pool:
        with hold_clock():
            await pool.update_weights(8, TensorWeights(tensors, directory=str(old)))
            with pytest.raises(EngineError, match="is in place"):
                await pool.update_weights(9, TensorWeights(tensors, directory=str(new)))
        assert pool.weight_version == 8
        assert (await ask(pool, 100, 1)).versions == [[8, 1]]
        assert cores[1].loaded == cores[0].loaded
        assert (len(os.listdir(old)), len(os.listdir(new))) == (1, 0)


@pytest.mark.parametrize("mode", UPDATE_MODES)
async def test_batch_weights_change_under_it_every_row_says_which_token_is_whose(
    mode: Any,
) -> None:
    """Eight trajectories; the simulated engine changes its stamp between two steps."""
    scenario = Scenario(seed=3, timing={"base_s": 0.1, "load_weights_s": 1.0}).reply("", filler=200)
    config = scenario.config(
        engine=SimulatedEngine(replicas=2), scheduling=SchedulingConfig(samples_per_prompt=8)
    )
    recorder = Recorder()
    async with recorder.open_rollout(config) as runtime:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_update_runtime_at, 5.0, runtime, mode)
            batch = await runtime.generate([rollout.Prompt(messages=[USER], uid="p")])
    mask = batch.tensors["response_mask"].bool()
    versions = batch.tensors["weight_versions"]
    seen = [row[valid].tolist() for row, valid in zip(versions, mask, strict=True)]
    assert all(row == sorted(row) for row in seen)
    expected = {0} if mode == "wait" else {0, 8}
    assert [set(row) for row in seen] == [expected] * 8
    if mode != "wait":  # a token each 0.1 s and more, from the start to the change
        assert all(20 < row.count(0) < 65 for row in seen)


USER = {"role": "user", "content": "hello"}


async def _update_runtime_at(seconds: float, runtime: Any, mode: Any) -> None:
    await anyio.sleep(seconds)
    await runtime.update_weights(version=8, source=DiskWeights("."), mode=mode)


class HalfLoadedCore(UpdatableCore):
    """Computes with weights of which only a part has come."""

    async def update_weights(self, version: int, source: DiskWeights) -> None:
        self.version = version
        raise RuntimeError("the link broke")


async def test_update_raises_of_no_kind_the_replica_is_restarted_with_the_old_weights() -> None:
    async with make_pool("test_weights:HalfLoadedCore", {"token_s": 1.0}).serving() as pool:
        with pytest.raises(EngineError, match="the link broke"):
            await pool.update_weights(8, DiskWeights("w8"))
        generation = Generation()
        await ask(pool, 100, 2, generation)
        assert generation.versions == [[0, 2]]
        assert pool.statistics()[0].starts == 2
