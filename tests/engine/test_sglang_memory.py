"""SGLang's memory: which engines may sleep, what is released, and what replicas cannot share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import anyio
import attrs
import pytest

from fake_core import CountingCore
from rollout.config import LocalProcessPlacement, RayPlacement, RolloutConfig, SGLangEngine
from rollout.engine import DiskWeights
from rollout.engine.core import (
    Chunk,
    EngineBroken,
    GenerationRequest,
    SamplingParams,
    pack_ids,
)
from rollout.engine.cores.sglang import SGLangCore
from rollout.engine.cores.sglang.adapter import SGLang
from rollout.engine.cores.sglang.server_arguments import NO_MEMORY_SAVER, SGLangOptions
from rollout.engine.pool.opening import build_core_spec
from rollout.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

SAVER = {"enable_memory_saver": True}


@attrs.define
class RunningSGLang:
    """As much of `adapter.SGLang` as a core needs without its processes."""

    info: Any = CountingCore().info
    model_path: str = "m"
    names_versions: bool = True
    answers: Any = ()
    aborted: list[str] = attrs.field(factory=list)
    #: What SGLang would be asked.
    asked: list[tuple[str, Any]] = attrs.field(factory=list)

    async def release(self, tags: tuple[str, ...]) -> None:
        self.asked.append(("release", tags))

    async def resume(self, tags: tuple[str, ...]) -> None:
        self.asked.append(("resume", tags))

    async def load_from_disk(self, path: str, version: int) -> None:
        self.asked.append(("load", version))

    async def media_fields(self, request: GenerationRequest) -> dict[str, Any]:
        return {}

    async def generate(self, **fields: Any) -> AsyncIterator[Any]:
        for answer in self.answers:
            yield answer

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def core_of(**options: Any) -> tuple[SGLangCore, RunningSGLang]:
    core, running = SGLangCore(model="m", **options), RunningSGLang()
    core._sglang, core._info = running, running.info  # type: ignore[assignment]
    core._failure = ""
    return core, running


async def test_sleep_at_level_2_releases_the_graphs_too_and_they_come_back_with_the_cache() -> None:
    core, running = core_of(server_args=SAVER)
    await core.sleep(2)
    await core.wake_up(("weights",))
    await core.wake_up(("kv_cache",))
    assert running.asked == [
        ("release", ("cuda_graph", "kv_cache", "weights")),
        ("resume", ("weights",)),
        ("load", 0),
        ("resume", ("cuda_graph", "kv_cache")),
    ]


async def test_sleep_at_level_1_releases_the_cache_alone_and_deeper_the_rest() -> None:
    core, running = core_of(server_args=SAVER)
    await core.sleep(1)
    await core.wake_up(("kv_cache", "weights"))
    await core.sleep(1)
    await core.sleep(2)
    assert running.asked == [
        ("release", ("kv_cache",)),
        ("resume", ("kv_cache",)),
        ("release", ("kv_cache",)),
        ("release", ("cuda_graph", "weights")),
    ]


async def test_sleep_without_the_memory_saver_is_refused_by_name() -> None:
    core, running = core_of()
    with pytest.raises(EngineError) as caught:
        await core.sleep(1)
    assert str(caught.value) == (
        "SGLang was started without its memory saver, and would release nothing; expected "
        "engine.server_args.enable_memory_saver = true (engine.sleep_between_batches and "
        "placement.colocate set it)"
    )
    assert running.asked == []
    assert SGLangOptions(model="m").no_sleep == NO_MEMORY_SAVER
    assert SGLangOptions(model="m", device="cpu").no_sleep == ""


async def collect(core: SGLangCore) -> list[Chunk]:
    sampling = SamplingParams(max_new_tokens=4)
    request = GenerationRequest(request_id="r", prompt_ids=pack_ids([5]), sampling=sampling)
    return [chunk async for chunk in core.generate(request)]


async def test_draining_engine_rejects_what_comes() -> None:
    core, _ = core_of()
    core.drain_nowait()
    (chunk,) = await collect(core)
    assert (chunk.finish_reason, chunk.error) == ("rejected", "the engine is being drained")


async def test_answer_that_cannot_be_read_ends_the_request_in_sglang_too() -> None:
    core, _ = core_of()
    running: Any = core._sglang
    running.answers = [{"meta_info": {"weight_version": "0"}}]
    (chunk,) = await collect(core)
    assert (chunk.finish_reason, chunk.error) == ("error", "SGLang failed: KeyError: 'output_ids'")
    assert running.aborted == ["r"]


@pytest.mark.parametrize("fault", ["raises", "answers"])
async def test_weights_that_sglang_may_have_loaded_in_part_break_the_engine(fault: str) -> None:
    class Tokens:
        async def pause_generation(self, request: object) -> None: ...

        async def continue_generation(self, request: object) -> None: ...

        async def update_weights_from_disk(self, request: object) -> tuple[bool, str]:
            if fault == "raises":
                raise RuntimeError("out of memory")
            return False, "RuntimeError: out of memory"

    sglang: Any = object.__new__(SGLang)
    sglang._tokens, sglang._types = Tokens(), Mock()
    with pytest.raises(EngineBroken) as caught:
        await sglang.load_from_disk("/w", 3)
    assert str(caught.value) == "SGLang did not load /w: RuntimeError: out of memory"


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_checkpoint_on_a_file_system_that_hangs_holds_up_nothing_else(tmp_path: Path) -> None:
    core, _ = core_of()
    os.mkfifo(tmp_path / "model.safetensors")
    with anyio.move_on_after(0.05) as scope:  # the loop runs on
        await core.update_weights(3, DiskWeights(str(tmp_path)))
    assert scope.cancelled_caught
    (tmp_path / "model.safetensors").open("wb").close()  # the thread ends


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


@pytest.mark.parametrize("name", ["port", "base_gpu_id"])
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
