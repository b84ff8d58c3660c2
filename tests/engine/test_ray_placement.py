"""Engines as actors of a real Ray cluster on this machine; its GPUs exist in its books only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import psutil
import pytest
import ray
from anyio.abc import Process

from own_processes import marked
from pools import generate
from rollout import RolloutConfig
from rollout.config import CustomEngine, RayPlacement, SGLangEngine, SimulatedEngine
from rollout.engine import gpu_slots_of, open_engines
from rollout.engine.placement import ray as ray_placement
from rollout.engine.pool.pool import EnginePool
from rollout.errors import ConfigError, EngineError

#: On a machine that others load, Ray takes minutes to start what takes seconds on an idle one.
PATIENCE_S = 300.0

#: Ray's client opens connections when it needs them and keeps them; `opened` looks for engines.
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.rollout(allow_leaks=("files", "processes")),
    pytest.mark.process,
]


@pytest.fixture
def anyio_backend() -> str:
    """Real time; starting engines takes seconds, so each test runs on one."""
    return "trio"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two machines in one: 4 CPUs and 2 GPUs, and a second node of 2 CPUs that can be killed."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "num_gpus": 2, "include_dashboard": False},
    )
    ray.init(address=cluster.address, log_to_driver=False, namespace="somebody-else")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def config(replicas: int = 1, core: str = "CountingCore", **placement: Any) -> RolloutConfig:
    return RolloutConfig(
        engine=CustomEngine(
            core=f"fake_core:{core}",
            options=placement.pop("options", {}),
            replicas=replicas,
            start_timeout_s=placement.pop("start_timeout_s", PATIENCE_S),
        ),
        placement=RayPlacement(**{"gpus_per_replica": 0.0, "cpus_per_replica": 1.0, **placement}),
    )


def engines() -> list[psutil.Process]:
    """The engine processes of this run, whatever their parent is."""
    found = []
    for pid in marked():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if "rollout.engine.channel.child" in process.cmdline():
                found.append(process)
    return found


@asynccontextmanager
async def opened(config: RolloutConfig) -> AsyncIterator[EnginePool]:
    before = {process.pid for process in engines()}
    async with open_engines(config) as pool:
        yield pool
    assert {process.pid for process in engines()} <= before


async def ask(pool: EnginePool, last: int, count: int) -> list[int]:
    return list((await generate(pool, [last], count)).ids)


async def ask_until_it_serves(pool: EnginePool, name: str) -> None:
    with anyio.fail_after(PATIENCE_S):
        while {r.name: r.state for r in pool.statistics()}[name] != "serving":
            await anyio.sleep(0.05)


def gpus_of(pool: EnginePool) -> list[str]:
    """What each engine sees."""
    return sorted(r.channel.info.core for r in pool._replicas.values() if r.channel)


async def test_replicas_with_gpus_of_their_own_serve_and_one_that_is_killed_serves_again(
    cluster: Any,
) -> None:
    before = {process.pid for process in engines()}
    gpus = ["CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"]
    async with opened(config(2, gpus_per_replica=1.0, core="DeviceCore")) as pool:
        mine = [process for process in engines() if process.pid not in before]
        assert len(mine) == 2
        assert gpus_of(pool) == gpus
        for last in range(12):
            assert await ask(pool, last, 3) == [last + 1, last + 2, last + 3]
        mine[0].kill()
        with anyio.fail_after(PATIENCE_S):
            while sum(replica.starts for replica in pool.statistics()) < 3:
                await anyio.sleep(0.05)
        (restarted,) = [r.name for r in pool.statistics() if r.starts == 2]
        await ask_until_it_serves(pool, restarted)
        for last in range(12):
            assert await ask(pool, last, 2) == [last + 1, last + 2]
        assert gpus_of(pool) == gpus
    assert await _free() == {"CPU": 4.0, "GPU": 2.0}


async def _free() -> dict[str, float]:
    """What the cluster can give, once Ray has noticed what was given back."""
    free: dict[str, float] = {}
    with anyio.move_on_after(PATIENCE_S):
        while free != {"CPU": 4.0, "GPU": 2.0}:
            await anyio.sleep(0.1)
            resources = ray.available_resources()
            free = {kind: resources.get(kind, 0.0) for kind in ("CPU", "GPU")}
    return free


def groups() -> list[str]:
    """The replicas that have a placement group."""
    table = ray.util.placement_group_table().values()
    return sorted(group["name"].rpartition("/")[2] for group in table if is_there(group))


def is_there(group: dict[str, Any]) -> bool:
    return bool(group["state"] != "REMOVED")


@pytest.mark.slow
async def test_removed_replica_leaves_its_place_on_a_full_machine_to_one_that_is_added(
    cluster: Any,
) -> None:
    full = config(2, gpus_per_replica=1.0, core="DeviceCore")
    async with opened(full) as pool:
        assert groups() == ["engine-0", "engine-1"]
        for removed, added in (("engine-0", "engine-2"), ("engine-1", "engine-3")):
            await pool.remove_replica(removed)
            assert removed not in groups()
            assert await pool.add_replica() == added
            assert added in groups()
        assert await ask(pool, 1, 2) == [2, 3]
        await pool.remove_replica("engine-2")
        with anyio.fail_after(PATIENCE_S):  # a trainer can have the GPU while the run goes on
            while ray.available_resources().get("GPU", 0.0) < 1.0:
                await anyio.sleep(0.1)
        assert groups() == ["engine-3"]
    assert groups() == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_replica_cancelled_as_ray_makes_its_group_gives_it_back_and_leaves_the_cluster(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = ray.nodes()
    began, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    make = ray.util.placement_group

    def make_late(*args: Any, **options: Any) -> Any:
        began.set()
        goes_on.wait()
        try:
            return make(*args, **options)
        finally:
            ended.set()

    async with opened(config(core="DeviceCore")) as pool:
        assert gpus_of(pool) == ["CUDA_VISIBLE_DEVICES="], "it was given none"
        monkeypatch.setattr(ray.util, "placement_group", make_late)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.add_replica)
            await anyio.to_thread.run_sync(began.wait)
            tasks.cancel_scope.cancel()
            goes_on.set()
        await anyio.to_thread.run_sync(ended.wait)
        assert groups() == ["engine-0"]
    assert ray.is_initialized()
    assert [n["NodeID"] for n in ray.nodes()] == [n["NodeID"] for n in nodes]


async def test_more_gpus_than_there_are_fails_and_says_what_is_free(cluster: Any) -> None:
    too_much = config(gpus_per_replica=8.0, start_timeout_s=1.0)
    await _free()  # of the tests before
    with pytest.raises(EngineError) as failure:
        async with open_engines(too_much):
            pytest.fail("opened")
    assert str(failure.value) == (
        "engine-0: Ray did not place it within engine.start_timeout_s = 1 s: asked for 8 GPU, "
        "1 CPU; free in the cluster: 2 GPU, 4 CPU; its machines: one with 2 GPU, 4 CPU"
    )
    assert await _free() == {"CPU": 4.0, "GPU": 2.0}


#: Trainers set it, so that their own actors see all GPUs.
LEAVING_DEVICES_ALONE = """
import os, sys
sys.path.insert(0, "..")
os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
import anyio, ray, test_ray_placement as t
ray.init("local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)
async def main():
    async with t.open_engines(t.config(2, gpus_per_replica=2.0, core="DeviceCore")) as pool:
        print(*t.gpus_of(pool))
anyio.run(main, backend="trio")
ray.shutdown()
"""


@pytest.mark.slow
async def test_replicas_see_their_own_gpus_where_ray_sets_nothing() -> None:
    with anyio.fail_after(PATIENCE_S):
        done = await anyio.run_process(
            [sys.executable, "-c", LEAVING_DEVICES_ALONE], cwd=os.path.dirname(__file__)
        )
    assert done.stdout.decode().splitlines()[-1] == (
        "CUDA_VISIBLE_DEVICES=0,1 CUDA_VISIBLE_DEVICES=2,3"
    )


@pytest.mark.slow
async def test_colocated_replica_shares_the_gpus_of_a_worker(cluster: Any) -> None:
    @ray.remote(num_gpus=2, num_cpus=0)
    class Worker:
        pass

    worker = Worker.remote()
    gpu_slots = await anyio.to_thread.run_sync(gpu_slots_of, [worker])
    async with opened(config(1, core="DeviceCore", colocate=gpu_slots)) as pool:
        assert gpus_of(pool) == ["CUDA_VISIBLE_DEVICES=0,1"]
    ray.kill(worker)


async def test_node_that_is_not_there_is_named(cluster: Any) -> None:
    with pytest.raises(
        EngineError, match=r"^placement: the cluster has no live node '203\.0\.113\.9'; it has \d"
    ):
        async with open_engines(config(nodes=("203.0.113.9",))):
            pytest.fail("opened")


@pytest.mark.slow
async def test_node_lost_moves_its_replica_to_another(cluster: Any) -> None:
    node = cluster.add_node(num_cpus=2)
    roomy = config(replicas=5)  # four here, and one there
    async with opened(roomy) as pool:
        cluster.remove_node(node, allow_graceful=False)
        with anyio.fail_after(PATIENCE_S):
            while all(r.state == "serving" for r in pool.statistics()):
                await anyio.sleep(0.05)
        for last in range(8):  # the others serve on
            assert await ask(pool, last, 1) == [last + 1]


@pytest.mark.slow
async def test_replica_over_two_machines_has_an_engine_on_each_and_ends_with_either(
    cluster: Any,
) -> None:
    node = cluster.add_node(num_cpus=2)
    spread = config(core="CrewCore", machines_per_replica=2, cpus_per_replica=2.0)
    before = {process.pid for process in engines()}
    try:
        async with opened(spread) as pool:
            (replica,) = pool._replicas.values()
            assert replica.channel is not None
            rank, _, pid = replica.channel.info.core.partition(":")
            assert rank == "1"
            first = [process.pid for process in engines() if process.pid not in before]
            assert len(first) == 2
            assert int(pid) in first
            assert await ask(pool, 1, 2) == [2, 3]
            os.kill(int(pid), signal.SIGKILL)  # the part that serves nobody
            with anyio.fail_after(PATIENCE_S):
                while pool.statistics()[0].starts < 2:
                    await anyio.sleep(0.05)
            await ask_until_it_serves(pool, "engine-0")
            assert not {process.pid for process in engines()} & set(first)
            assert await ask(pool, 1, 2) == [2, 3]
    finally:
        cluster.remove_node(node)


DRIVER = """
import anyio, os, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
run = dict(os.environ)
from test_ray_placement import config
os.environ.update(run)  # its engines are of the run that started it, not of one of its own
from rollout.engine import open_engines

async def main():
    async with open_engines(config(address=sys.argv[2])):
        print("up", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)

anyio.run(main)
"""


@asynccontextmanager
async def driver(address: str) -> AsyncIterator[tuple[Process, list[psutil.Process]]]:
    """A driver process with one engine up, and everything that it started on this machine."""
    before = {engine.pid for engine in engines()}
    command = [sys.executable, "-c", DRIVER, os.path.dirname(__file__), address]
    pipe = subprocess.PIPE
    async with await anyio.open_process(command, stdin=pipe, stdout=pipe, stderr=None) as process:
        assert process.stdout is not None
        said = b""
        while b"up\n" not in said:  # Ray may have said something before
            said += await process.stdout.receive()
        yield process, [engine for engine in engines() if engine.pid not in before]


@pytest.mark.parametrize(
    ("address", "end"),
    [
        ("cluster", "kill"),
        pytest.param("local", "leave", marks=pytest.mark.slow),
    ],
)
async def test_driver_that_ends_leaves_no_engine(cluster: Any, address: str, end: str) -> None:
    where = cluster.address if address == "cluster" else address
    async with driver(where) as (process, engines):
        assert len(engines) == 1
        if end == "kill":
            process.kill()
        else:
            assert process.stdin is not None
            await process.stdin.aclose()
        _, alive = await anyio.to_thread.run_sync(partial(psutil.wait_procs, engines, timeout=30))
        assert not alive


def test_config_only_engines_with_node_ranks_spread_over_machines() -> None:
    spread = RayPlacement(machines_per_replica=2)
    with pytest.raises(ConfigError, match=r"machines_per_replica = 2: expected 1 for engine\.kind"):
        RolloutConfig(engine=SimulatedEngine(), placement=spread)
    with pytest.raises(ConfigError, match=r"a divisor of engine\.tensor_parallel = 3"):
        RolloutConfig(engine=SGLangEngine(tensor_parallel=3), placement=spread)
    RolloutConfig(engine=SGLangEngine(tensor_parallel=16), placement=spread)


@pytest.mark.parametrize(
    ("placement", "error"),
    [
        (
            {"colocate": ("here:0", "here:1")},
            "placement.colocate = ['here:0', 'here:1']: expected one for each of "
            "engine.replicas = 1",
        ),
        (
            {"colocate": ("here",)},
            "placement.colocate[0] = 'here': expected a string like 'node:0,1' (a Ray node's id "
            "or address, and GPU ids)",
        ),
        (
            {"gpus_per_replica": 1.5},
            "placement.gpus_per_replica = 1.5: expected a whole number a machine, or at most 1",
        ),
        (
            {"cpus_per_replica": 1e-6},
            "placement.cpus_per_replica = 1e-06: expected 0 or at least 0.0001 a machine",
        ),
    ],
)
def test_config_that_cannot_be_is_refused(placement: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as failure:
        config(**placement)
    assert error in str(failure.value)


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


@pytest.mark.slow
async def test_killed_replica_keeps_its_group_while_it_does_not_start_again(
    cluster: Any, tmp_path: Path
) -> None:
    flag = tmp_path / "broken"
    options = {"flag": str(flag)}
    before = {process.pid for process in engines()}
    async with opened(config(1, core="FlaggedCore", options=options)) as pool:
        (engine,) = [process for process in engines() if process.pid not in before]
        (group,) = [pg for pg, of in ray.util.placement_group_table().items() if is_there(of)]
        flag.touch()
        engine.kill()
        with anyio.fail_after(PATIENCE_S):
            while "no card" not in pool.statistics()[0].last_error:
                await anyio.sleep(0.05)
        assert [pg for pg, of in ray.util.placement_group_table().items() if is_there(of)] == [
            group
        ]
        flag.unlink()
        await ask_until_it_serves(pool, "engine-0")
        assert groups() == ["engine-0"]
        await pool.remove_replica("engine-0")
        assert groups() == []


@pytest.mark.slow
async def test_group_that_somebody_else_removes_is_made_anew(cluster: Any) -> None:
    async with opened(config()) as pool:
        (made,) = [pg for pg, of in ray.util.placement_group_table().items() if is_there(of)]
        placement = pool._settings.placement.groups["engine-0"]  # type: ignore[attr-defined]
        await anyio.to_thread.run_sync(ray.util.remove_placement_group, placement)
        with anyio.fail_after(PATIENCE_S):
            while pool.statistics()[0].starts < 2:
                await anyio.sleep(0.05)
        await ask_until_it_serves(pool, "engine-0")
        assert await ask(pool, 1, 1) == [2]
        assert groups() == ["engine-0"]
        assert not is_there(ray.util.placement_group_table()[made])
