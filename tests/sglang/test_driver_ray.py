"""The real SGLang as actors of a real Ray cluster: two raylets on this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import psutil
import pytest
import ray
from driver import (
    PYTHON,
    TURNS,
    ask_all,
    check_pair,
    choices,
    clock,
    command,
    is_alive,
    load_networks,
    processes,
    prompts,
    questions,
    schedulers,
    sglang,
    shares_an_engine,
)

from rollout import open_rollout
from rollout.config import RayPlacement
from rollout.engine import DiskWeights, open_engines
from rollout.engine.pool.pool import EnginePool
from rollout.errors import EngineError

pytestmark = [pytest.mark.anyio, shares_an_engine]
BATCH = 48
ATTEMPTS = 5
#: Of the weights under which engines are lost.
VERSION = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two machines of two cores and one; somebody else's, which we join."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, namespace="somebody-else")
    cluster.second = cluster.add_node(num_cpus=1)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def engines() -> list[psutil.Process]:
    """The processes of our engines on that cluster."""
    return [
        process
        for process in processes()
        if "rollout.engine.channel.child" in command(process) and _actor_above(process)
    ]


@pytest.fixture(scope="module")
async def runtime(cluster: Any, models: list[str]) -> AsyncIterator[Any]:
    """Three replicas, one of them on the second machine; afterwards the cluster is as it was."""
    placement = RayPlacement(python=PYTHON, gpus_per_replica=0.0, cpus_per_replica=1.0)
    before = set(engines())
    async with open_rollout(sglang(models[0], placement, replicas=3), [clock]) as runtime:
        yield runtime
        ours = {p for engine in set(engines()) - before for p in _family(engine)}
    assert not [process for process in ours if is_alive(process)]
    assert ray.is_initialized()
    while ray.available_resources().get("CPU") != 3.0:  # it notices what is given back in time
        await anyio.sleep(0.1)
    assert sorted(n["Resources"]["CPU"] for n in ray.nodes() if n["Alive"]) == [1.0, 2.0]


def _family(engine: psutil.Process) -> list[psutil.Process]:
    return [engine, *engine.children(recursive=True)]


@pytest.fixture
def pool(runtime: Any) -> EnginePool:
    pool: EnginePool = runtime.engines
    return pool


async def until_all_serve(pool: EnginePool) -> None:
    while [r.state for r in pool.statistics()] != ["serving"] * 3 or len(pool.router.replicas) < 3:
        await anyio.sleep(0.05)


async def test_ray_unschedulable_request_says_what_is_free_and_what_was_asked(
    cluster: Any, models: list[str]
) -> None:
    config = sglang(
        models[0], RayPlacement(), device="cuda", tensor_parallel=8, start_timeout_s=1.0
    )
    with pytest.raises(EngineError) as caught:
        async with open_engines(config):
            pytest.fail("opened")
    assert str(caught.value) == (
        "engine-0: Ray did not place it within engine.start_timeout_s = 1 s: asked for 8 GPU, "
        "1 CPU; free in the cluster: 0 GPU, 3 CPU; its machines: one with 0 GPU, 2 CPU; one with "
        "0 GPU, 1 CPU"
    )


@pytest.mark.slow
async def test_ray_replica_over_two_machines_is_one_sglang_of_two_node_ranks(
    cluster: Any, models: list[str]
) -> None:
    placement = RayPlacement(
        python=PYTHON, gpus_per_replica=0.0, cpus_per_replica=2.0, machines_per_replica=2
    )
    before = set(engines())
    networks = load_networks(models)
    async with open_engines(sglang(models[0], placement, tensor_parallel=2)) as pool:
        assert len(set(engines()) - before) == 2
        for version, network in enumerate(networks):
            if version:
                await pool.update_weights(version, DiskWeights(models[version]))
            for text, answer in zip(prompts(4), await ask_all(pool, prompts(4)), strict=True):
                ids = text + list(answer.ids)
                assert ids[len(text) :] == choices(network, ids)[len(text) - 1 : -1]
                assert answer.versions == [[version, len(answer.ids)]]
    assert set(engines()) <= before


async def test_ray_three_replicas_serve_as_every_engine_does(pool: EnginePool) -> None:
    await check_pair(pool)


@pytest.mark.slow
async def test_ray_actor_and_raylet_killed_in_mid_batch_replicas_come_back_with_the_weights(
    runtime: Any, pool: EnginePool, cluster: Any, models: list[str]
) -> None:
    """Of one replica the actor, of another the machine; the third serves on."""

    def kill() -> None:
        actors = [actor for engine in engines() if (actor := _actor_above(engine))]
        raylet = cluster.second.all_processes["raylet"][0].process.pid
        next(actor for actor in actors if actor.ppid() != raylet).kill()
        cluster.remove_node(cluster.second, allow_graceful=False)
        cluster.second = cluster.add_node(num_cpus=1)

    await killed_in_mid_batch(runtime, pool, models[1], kill, deaths=2)


@pytest.mark.slow
async def test_ray_scheduler_killed_in_mid_batch_its_replica_comes_back_with_the_weights(
    runtime: Any, pool: EnginePool, models: list[str]
) -> None:
    def kill() -> None:
        next(process for process in schedulers() if _actor_above(process)).kill()

    await killed_in_mid_batch(runtime, pool, models[1], kill, deaths=1)


async def killed_in_mid_batch(
    runtime: Any, pool: EnginePool, model: str, kill: Any, *, deaths: int
) -> None:
    if pool.router.replicas[0].weight_version != VERSION:
        await pool.update_weights(VERSION, DiskWeights(model))
    starts = sum(replica.starts for replica in pool.statistics())
    await batch_survives(runtime, pool, kill)
    await until_all_serve(pool)
    assert sum(replica.starts for replica in pool.statistics()) >= starts + deaths
    await everyone_says_what_the_new_weights_say(pool, model)


async def batch_survives(runtime: Any, pool: EnginePool, kill: Any) -> None:
    """Every trajectory completes, all tokens of the current weights."""
    is_killed = False
    for attempt in range(ATTEMPTS):
        before = sum(replica.tokens.arrived for replica in pool.statistics())
        batches = []

        async def generate(about: str, done: list[Any] = batches) -> None:
            done.append(await runtime.generate(questions(BATCH, about)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate, f"{kill} {attempt}")
            while sum(r.tokens.arrived for r in pool.statistics()) - before < BATCH * 8:
                await anyio.sleep(0.002)
            # A driver on a busy machine may be late: then with the next batch.
            is_killed = not batches and all(replica.in_flight for replica in pool.statistics())
            if is_killed:
                kill()  # Ray wants the main thread: the loop stands still for a moment
        (batch,) = batches
        assert {sample.outcome for sample in batch.samples} <= {"completed", "length"}
        assert [sample.num_turns for sample in batch.samples] == [2 * TURNS] * BATCH
        assert batch.tensors["weight_versions"].unique().tolist() == [-1, VERSION]
        if is_killed:
            return
    pytest.fail("no batch had requests under way on every replica")


async def everyone_says_what_the_new_weights_say(pool: EnginePool, model: str) -> None:
    (network,) = load_networks([model])
    names = [replica.name for replica in pool.statistics()]
    for asked in names:
        others = [name for name in names if name != asked]
        for name in others:
            pool.drain(name)
        for text, answer in zip(prompts(4), await ask_all(pool, prompts(4)), strict=True):
            ids = text + list(answer.ids)
            assert ids[len(text) :] == choices(network, ids)[len(text) - 1 : -1]
            assert answer.versions == [[VERSION, len(answer.ids)]]
        for name in others:
            pool.resume(name)


def _actor_above(process: psutil.Process) -> psutil.Process | None:
    return next((above for above in process.parents() if "ray::" in command(above)), None)
