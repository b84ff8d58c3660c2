"""SGLang's memory: which engines may sleep, what is released, and what replicas cannot share."""

from __future__ import annotations

from typing import Any

import anyio
import attrs
import msgspec
import pytest

import fake_core
from fake_core import CountingCore
from rollout.config import LocalProcessPlacement, RayPlacement, RolloutConfig, SGLangEngine
from rollout.config.engines import SGLANG_OWN
from rollout.engine.cores.sglang import SGLangCore
from rollout.engine.cores.sglang.server_arguments import NO_MEMORY_SAVER, SGLangOptions
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.placement import CoreSpec
from rollout.engine.pool.opening import build_core_spec
from rollout.engine.pool.pool import EnginePool
from rollout.engine.routing import Router
from rollout.errors import ConfigError, EngineError
from test_pool import ask

pytestmark = pytest.mark.anyio

SAVER = {"enable_memory_saver": True}


class Maintenance:
    """Notes what SGLang would be asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    async def release(self, tags: tuple[str, ...]) -> None:
        self.asked.append(("release", tags))

    async def resume(self, tags: tuple[str, ...]) -> None:
        self.asked.append(("resume", tags))

    async def load_from_disk(self, path: str, version: int) -> None:
        self.asked.append(("load", version))


@attrs.define
class RunningSGLang:
    """As much of `adapter.SGLang` as its memory concerns."""

    maintenance: Maintenance = attrs.field(factory=Maintenance)
    info: Any = CountingCore().info


def core_of(**options: Any) -> tuple[SGLangCore, Maintenance]:
    core, running = SGLangCore(model="m", **options), RunningSGLang()
    core._sglang = running  # type: ignore[assignment]
    core._failure = ""
    return core, running.maintenance


async def test_sleep_at_level_2_releases_the_graphs_too_and_they_come_back_with_the_cache() -> None:
    core, maintenance = core_of(server_args=SAVER)
    await core.sleep(2)
    await core.wake_up(("weights",))
    await core.wake_up(("kv_cache",))
    assert maintenance.asked == [
        ("release", ("cuda_graph", "kv_cache", "weights")),
        ("resume", ("weights",)),
        ("load", 0),
        ("resume", ("cuda_graph", "kv_cache")),
    ]


async def test_sleep_at_level_1_releases_the_cache_alone() -> None:
    core, maintenance = core_of(server_args=SAVER)
    await core.sleep(1)
    await core.wake_up(("kv_cache", "weights"))
    assert maintenance.asked == [("release", ("kv_cache",)), ("resume", ("kv_cache",))]


async def test_sleep_deeper_after_level_1_releases_the_rest() -> None:
    core, maintenance = core_of(server_args=SAVER)
    await core.sleep(1)
    await core.sleep(2)
    assert maintenance.asked[1:] == [("release", ("cuda_graph", "weights"))]


async def test_sleep_without_the_memory_saver_is_refused_by_name() -> None:
    core, maintenance = core_of()
    with pytest.raises(EngineError) as caught:
        await core.sleep(1)
    assert str(caught.value) == (
        "SGLang was started without its memory saver, and would release nothing; expected "
        "engine.server_args.enable_memory_saver = true (engine.sleep_between_batches and "
        "placement.colocate set it)"
    )
    assert maintenance.asked == []
    assert SGLangOptions(model="m").no_sleep == NO_MEMORY_SAVER
    assert SGLangOptions(model="m", device="cpu").no_sleep == ""


class SleeplessCore(CountingCore):
    """Cannot sleep, and says so."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.info = msgspec.structs.replace(self.info, no_sleep="it never sleeps")


async def test_sleep_that_an_engine_cannot_do_is_refused_before_requests_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fake_core, "SleeplessCore", SleeplessCore, raising=False)
    specs = [CoreSpec("fake_core:SleeplessCore", {"token_s": 0.01})]
    pool = EnginePool(placement=InProcess(), specs=specs, router=Router(), start_timeout_s=5)
    async with pool.serving(), anyio.create_task_group() as tasks:
        tasks.start_soon(ask, pool, 5, 20)
        while not pool.tokens_under_way:
            await anyio.sleep(0.01)
        with pytest.raises(EngineError) as caught:
            await pool.sleep(1)
        assert str(caught.value) == "engine-0: it never sleeps"
        (attempt,) = pool._requests.active
        assert not attempt.is_interrupted


def config_of(placement: Any = None, **engine: Any) -> RolloutConfig:
    return RolloutConfig(
        engine=SGLangEngine(**engine), placement=placement or LocalProcessPlacement()
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (config_of(), None),
        (config_of(sleep_between_batches=True), True),
        (config_of(RayPlacement(colocate=("n:0",))), True),
        (
            config_of(RayPlacement(colocate=("n:0",)), server_args={"enable_memory_saver": False}),
            False,
        ),
        (config_of(device="cpu", sleep_between_batches=True), None),
    ],
)
def test_memory_saver_is_on_where_engines_are_to_sleep(
    config: RolloutConfig, expected: bool | None
) -> None:
    server_args = build_core_spec(config, 0).options["server_args"]
    assert server_args.get("enable_memory_saver") is expected


def test_memory_saver_off_with_sleep_between_batches_is_a_fault() -> None:
    with pytest.raises(ConfigError) as caught:
        SGLangEngine(sleep_between_batches=True, server_args={"enable_memory_saver": False})
    assert caught.value.faults == (
        "engine.server_args.enable_memory_saver = False: expected true (or leave it out) with "
        "engine.sleep_between_batches",
    )


@pytest.mark.parametrize("name", ["port", "nccl_port", "base_gpu_id", *sorted(SGLANG_OWN)])
def test_argument_that_replicas_cannot_share_is_a_fault(name: str) -> None:
    SGLangEngine(server_args={name: 3})
    with pytest.raises(ConfigError) as caught:
        SGLangEngine(replicas=2, server_args={name: 3})
    assert caught.value.faults == (
        f"engine.server_args.{name} = 3: expected none with engine.replicas = 2: each needs its "
        "own",
    )


def test_argument_that_replicas_cannot_share_is_refused_to_one_that_is_added() -> None:
    config = config_of(server_args={"nccl_port": 3})
    assert build_core_spec(config, 0).options["server_args"]["nccl_port"] == 3
    with pytest.raises(EngineError) as caught:
        build_core_spec(config, 1)
    assert str(caught.value) == (
        "engine.server_args.nccl_port = 3: expected none for a second replica: each needs its own"
    )


def test_device_of_an_engine_is_its_first_gpu() -> None:
    specs = [build_core_spec(config_of(tensor_parallel=2), replica) for replica in range(2)]
    devices = [SGLangOptions(**spec.options).torch_device for spec in specs]
    assert devices == ["cuda:0", "cuda:2"]
    assert SGLangOptions(model="m", device="cpu").torch_device == "cpu"
