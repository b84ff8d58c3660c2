"""Weights that are broadcast: received by every replica, written down once on each machine."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import attrs
import msgspec
import pytest

import faulty_cores
from pools import make_pool
from rollout.engine import weight_broadcasting
from rollout.engine.cores.base import name_gpu
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.placement import CoreSpec, ReplicaHandle
from rollout.engine.pool.pool import EnginePool
from rollout.engine.weight_broadcasting import describe_tensors, receive_weights
from rollout.engine.weights import PREFIX, DiskWeights, DistributedWeights
from rollout.errors import EngineError
from rollout.testing import hold_clock

pytestmark = pytest.mark.anyio

MACHINES = {"engine-0": "a", "engine-1": "b", "engine-2": "a", "engine-3": "a"}


class Machines(InProcess):
    """As if the engines were on machines of their own."""

    @asynccontextmanager
    async def open_replica(
        self, name: str, spec: CoreSpec, start_timeout_s: float
    ) -> AsyncIterator[ReplicaHandle]:
        async with super().open_replica(name, spec, start_timeout_s) as handle:
            yield attrs.evolve(handle, machine=MACHINES[name])


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every core that a test starts, in order."""
    made: list[Any] = []
    real = faulty_cores.UpdatableCore

    class Core(real):  # type: ignore[valid-type, misc]
        async def update_weights(self, version: int, source: DiskWeights) -> None:
            assert os.path.isdir(source.path)  # noqa: ASYNC240
            await super().update_weights(version, source)

    def make(*, gpu: str = "", **options: Any) -> Any:
        made.append(Core(**options))
        made[-1].info = msgspec.structs.replace(made[-1].info, gpu=gpu)
        return made[-1]

    monkeypatch.setattr(faulty_cores, "UpdatableCore", make)
    return made


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[DistributedWeights]:
    """What each replica was told to receive; nothing is sent."""
    told: list[DistributedWeights] = []

    def receive(weights: DistributedWeights, device: str) -> str:
        told.append(weights)
        if not weights.is_kept:
            return ""
        if weights.host == "lost":
            raise EngineError("the weights were not received: no sender")
        return tempfile.mkdtemp(prefix=PREFIX, dir=weights.directory)

    monkeypatch.setattr(weight_broadcasting, "receive_weights", receive)
    return told


def pool_of(*options: dict[str, Any]) -> EnginePool:
    cores = [{"index": index, **each} for index, each in enumerate(options)]
    return make_pool("faulty_cores:UpdatableCore", *cores, placement=Machines())


def loaded(cores: list[Any]) -> list[list[str]]:
    """What each replica has loaded, in their order."""
    return [core.loaded for core in sorted(cores, key=lambda core: core.index)]


def left_in(directory: Path) -> list[str]:
    return os.listdir(directory)


def sent(directory: Path, replicas: int = 4, host: str = "h", **options: Any) -> DistributedWeights:
    return describe_tensors(
        {}, host=host, port=1, world_size=replicas + 1, directory=str(directory), **options
    )


async def test_broadcast_is_written_down_once_on_each_machine(
    cores: list[Any], received: list[DistributedWeights], tmp_path: Path
) -> None:
    async with pool_of({}, {}, {}, {}).serving() as pool:
        with hold_clock():  # engines receive in threads, and load at once
            await pool.update_weights(8, sent(tmp_path))
        paths = loaded(cores)
        assert paths[0] == paths[2] == paths[3] != paths[1]
        assert {Path(path).parent for (path,) in paths} == {tmp_path}
        assert sorted((told.rank, told.is_kept) for told in received) == [
            (1, True),
            (2, True),
            (3, False),
            (4, False),
        ]
        assert [replica.weight_version for replica in pool.router.replicas] == [8] * 4
        assert left_in(tmp_path) == []


async def test_broadcast_that_its_keeper_does_not_get_leaves_all_with_the_old_weights(
    cores: list[Any], received: list[DistributedWeights], tmp_path: Path
) -> None:
    async with pool_of({}, {}, {}, {}).serving() as pool:
        with hold_clock(), pytest.raises(EngineError) as caught:
            await pool.update_weights(8, sent(tmp_path, host="lost"))
        assert "the weights were not received: no sender" in str(caught.value)
        assert loaded(cores) == [[], [], [], []]
        assert [replica.weight_version for replica in pool.router.replicas] == [0] * 4


async def test_broadcast_whose_sender_never_comes_says_what_took_too_long(
    cores: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    released = threading.Event()

    def receive(weights: DistributedWeights, device: str) -> str:
        released.wait()
        return ""

    monkeypatch.setattr(weight_broadcasting, "receive_weights", receive)
    async with pool_of({}).serving() as pool:
        with pytest.raises(EngineError) as caught:
            await pool.update_weights(8, sent(tmp_path, replicas=1))
        released.set()
    assert str(caught.value) == (
        "engine-0: the weights that are broadcast are not received after "
        "engine.start_timeout_s = 5 s"
    )


async def test_broadcast_that_one_replica_cannot_load_is_removed_all_the_same(
    cores: list[Any], received: list[DistributedWeights], tmp_path: Path
) -> None:
    directory = tmp_path / "odd"
    directory.mkdir()
    async with pool_of({"name": "picky"}, {}, {}, {}).serving() as pool:
        with hold_clock():
            await pool.update_weights(8, sent(directory))
        assert list(map(bool, loaded(cores))) == [False, True, True, True]
        assert left_in(directory) == []


async def test_broadcast_brings_up_replicas_that_were_lost_or_added_after_the_one_before(
    cores: list[Any], received: list[DistributedWeights], tmp_path: Path
) -> None:
    def describe(pool: EnginePool) -> DistributedWeights:
        replicas = pool.statistics()
        return describe_tensors({}, host="h", port=1, replicas=replicas, directory=str(tmp_path))

    async def states_become(pool: EnginePool, states: list[str]) -> None:
        with anyio.fail_after(60):
            while [each.state for each in pool.statistics()] != states:
                await anyio.sleep(0.1)

    async with pool_of({}, {}).serving() as pool, anyio.create_task_group() as tasks:
        with hold_clock():
            await pool.update_weights(8, describe(pool))
        cores[0].on_death()
        tasks.start_soon(pool.add_replica)
        await anyio.sleep(20)
        assert sorted(each.state for each in pool.statistics()) == ["serving", *["waiting"] * 2]
        with hold_clock():
            await pool.update_weights(9, describe(pool))
        await states_become(pool, ["serving"] * 3)
        assert [told.world_size for told in received] == [3, 3, 4, 4, 4]
        assert [replica.weight_version for replica in pool.router.replicas] == [9] * 3
        for core in [core for core in cores if not core.is_closed]:
            core.on_death()
        await anyio.sleep(0.1)
        with pytest.raises(EngineError, match="no replica serves, or waits for weights"):
            await pool.update_weights(10, describe(pool))
        await states_become(pool, ["waiting"] * 3)
        with hold_clock():  # none serves, and all have it when it returns
            await pool.update_weights(10, describe(pool))
        await states_become(pool, ["serving"] * 3)
        assert [replica.weight_version for replica in pool.router.replicas] == [10] * 3


async def test_broadcast_over_nccl_to_two_replicas_on_one_gpu_is_refused(
    cores: list[Any], received: list[DistributedWeights], tmp_path: Path
) -> None:
    gpus = ({"gpu": "0"}, {"gpu": "0"}, {"gpu": "0"}, {"gpu": "1"})
    async with pool_of(*gpus).serving() as pool:
        with pytest.raises(EngineError) as caught:
            await pool.update_weights(8, sent(tmp_path, backend="nccl"))
        assert str(caught.value) == (
            "engine-0 and engine-2 are both on GPU 0 of one machine, and NCCL wants one for each; "
            "expected backend = 'gloo'"
        )
        assert received == []
        with hold_clock():
            await pool.update_weights(8, sent(tmp_path))
        assert len(received) == 4


def test_receiver_over_nccl_without_a_gpu_is_refused_by_name() -> None:
    with pytest.raises(EngineError) as caught:
        receive_weights(sent(Path(), backend="nccl"), "cpu")
    assert str(caught.value) == (
        "DistributedWeights: backend = 'nccl', and the engine computes on 'cpu'; expected 'gloo'"
    )


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, "cuda", "0"),
        ("GPU-8ab, GPU-9cd", "cuda:1", "GPU-9cd"),
        ("", "cuda:0", ""),
        ("4,5", "cpu", ""),
    ],
)
def test_name_gpu_a_device_is_the_one_that_the_process_sees(
    visible: str | None, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert name_gpu(device) == expected
