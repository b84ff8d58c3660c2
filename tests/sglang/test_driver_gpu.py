"""What only GPUs can show: memory that is really released, and weights from GPU to GPU.

`make test-gpu` runs it; ``ROLLOUT_SGLANG_PYTHON`` names the interpreter of an SGLang on CUDA.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest
from driver import EMBEDDED, PYTHON, ask, prompts, shares_an_engine
from safetensors.torch import load_file

from rollout.config import LocalProcessPlacement, ModelConfig, RolloutConfig, SGLangEngine
from rollout.engine import open_engines
from rollout.engine.model_files import resolve_model
from rollout.engine.pool.generation import Generation
from rollout.engine.weight_broadcasting import describe_tensors
from rollout.errors import EngineError


def gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return found.stdout.count("GPU ")


GPUS = gpus()
pytestmark = [
    pytest.mark.anyio,
    shares_an_engine,
    pytest.mark.skipif(GPUS == 0, reason="needs a GPU"),
]
MIB_SLACK = 200


def used_mib(gpu: int = 0) -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run([*query, "-i", str(gpu)], capture_output=True, text=True, check=True)
    return int(told.stdout)


def config_of(replicas: int = 1, **server_args: Any) -> RolloutConfig:
    return RolloutConfig(
        model=ModelConfig(path=EMBEDDED),
        engine=SGLangEngine(replicas=replicas, memory_fraction=0.5, server_args=server_args),
        placement=LocalProcessPlacement(python=PYTHON),
    )


async def test_sleep_gives_the_memory_back_and_wake_up_takes_it_again() -> None:
    before = used_mib()
    async with open_engines(config_of(enable_memory_saver=True)) as pool:
        text, awake = prompts(1)[0], used_mib() - before
        first = await ask(pool, text, Generation())
        await pool.sleep(1)
        without_cache = used_mib() - before
        await pool.sleep(2)
        asleep = used_mib() - before
        assert asleep < without_cache < awake
        assert asleep < awake / 4
        await pool.wake_up(["weights"])
        await pool.wake_up()
        assert used_mib() - before == pytest.approx(awake, abs=MIB_SLACK)
        assert (await ask(pool, text, Generation())).ids == first.ids
    assert used_mib() == pytest.approx(before, abs=MIB_SLACK)


async def test_sleep_at_level_2_leaves_no_cuda_graphs() -> None:
    asleep = []
    for is_without in (True, False):
        before = used_mib()
        config = config_of(enable_memory_saver=True, disable_cuda_graph=is_without)
        async with open_engines(config) as pool:
            await pool.sleep(2)
            asleep.append(used_mib() - before)
            await pool.wake_up()
            await ask(pool, prompts(1)[0], Generation())
    without, with_graphs = asleep
    assert with_graphs < without + MIB_SLACK


async def test_sleep_without_the_memory_saver_is_refused() -> None:
    async with open_engines(config_of()) as pool:
        with pytest.raises(EngineError, match="SGLang was started without its memory saver"):
            await pool.sleep(1)
        assert len((await ask(pool, prompts(1)[0], Generation(), ignore_eos=True)).ids) == 32


#: The trainer's process, on the last GPU.
SENDER = """
import sys, msgspec
from safetensors.torch import load_file
from rollout.engine.weight_broadcasting import send_weights
from rollout.engine.weights import DistributedWeights
send_weights(load_file(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=DistributedWeights))
"""


@pytest.mark.skipif(GPUS < 2, reason="needs a GPU for the sender and one for each replica")
async def test_weights_go_from_gpu_to_gpu_each_replica_on_its_own() -> None:
    replicas = min(GPUS - 1, 2)
    file = f"{resolve_model(EMBEDDED, None)}/model.safetensors"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    weights = describe_tensors(
        load_file(file), host="127.0.0.1", port=port, world_size=replicas + 1, backend="nccl"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(GPUS - 1)}
    async with open_engines(config_of(replicas)) as pool:
        channels = [replica.channel for replica in pool._replicas.values()]
        assert [c.info.gpu for c in channels if c] == [str(n) for n in range(replicas)]
        async with anyio.create_task_group() as tasks:
            text = msgspec.json.encode(weights).decode()
            command = [PYTHON, "-c", SENDER, file, text]
            tasks.start_soon(
                partial(anyio.run_process, command, env=environment, stderr=sys.stderr)
            )
            await pool.update_weights(8, weights)
        answer = await ask(pool, prompts(1)[0], Generation(), ignore_eos=True)
        assert answer.versions == [[8, 32]]
