"""Two sets of weights of a small random model, on the embedded engine in a process of its own."""

from __future__ import annotations

import os
import socket
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file

from pools import generate
from rollout.config import ModelConfig, RolloutConfig, TransformersEngine
from rollout.engine import DiskWeights, TensorWeights, open_engines
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.engine.weight_broadcasting import describe_tensors, receive_weights, send_weights
from rollout.engine.weights import PREFIX, stage
from rollout.errors import EngineError
from tiny_models import TINY, save_model

pytestmark = [pytest.mark.anyio, pytest.mark.process]
NEW_TOKENS = 400


@pytest.fixture
def anyio_backend() -> str:
    """Real time: the engine is a process."""
    return "trio"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    config = transformers.LlamaConfig(**TINY)
    return [save_model(config, tmp_path_factory.mktemp("model"), seed) for seed in (0, 1)]


async def ask(pool: EnginePool, prompt: list[int], into: Generation, count: int) -> None:
    await generate(
        pool, prompt, count, into, session=str(id(into)), temperature=0.0, ignore_eos=True
    )


def greedy(path: str, prompt: list[int], count: int) -> list[int]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # an end token is a token like any other
    with torch.inference_mode():
        answer = model.eval().generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False
        )
    ids: list[int] = answer[0, len(prompt) :].tolist()
    return ids


def staged(directory: Path) -> list[Path]:
    return list(directory.glob(f"{PREFIX}*"))


def tensors_in(path: str, directory: Path) -> TensorWeights:
    tensors = load_file(f"{path}/model.safetensors")
    return TensorWeights(tensors, bucket_bytes=32 * 1024, directory=str(directory))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "tensors"])
async def test_abort_and_resume_goes_on_as_a_fresh_prefill_under_the_new_weights(
    kind: str, models: list[str], tmp_path: Path
) -> None:
    source = DiskWeights(models[1]) if kind == "disk" else tensors_in(models[1], tmp_path)
    prompts = [[5 + number, 77, 300 - number, 9] for number in range(8)]
    answers, fresh = ([Generation() for _ in prompts] for _ in range(2))
    config = RolloutConfig(
        model=ModelConfig(path=models[0]), engine=TransformersEngine(dtype="float32", replicas=1)
    )
    async with open_engines(config) as pool:
        async with anyio.create_task_group() as tasks:
            for prompt, answer in zip(prompts, answers, strict=True):
                tasks.start_soon(ask, pool, prompt, answer, NEW_TOKENS)
            while not all(answer.ids for answer in answers):
                await anyio.sleep(0.005)
            await pool.update_weights(8, source)
        for prompt, answer, again in zip(prompts, answers, fresh, strict=True):
            (first, before), (second, after) = answer.versions
            assert (first, second, before + after) == (0, 8, NEW_TOKENS)
            await ask(pool, prompt + list(answer.ids[:before]), again, after)
            assert again.ids == answer.ids[before:]
        assert len(staged(tmp_path)) == (kind == "tensors")
        with pytest.raises(EngineError) as caught:
            await pool.update_weights(9, tensors_of_nothing(tmp_path))
        assert "is missing" in str(caught.value)
        assert len(staged(tmp_path)) == (kind == "tensors")
        assert pool.router.replicas[0].weight_version == 8
    assert staged(tmp_path) == []
    (_, before), (_, after) = answers[0].versions
    text = prompts[0] + list(answers[0].ids[:before])
    assert list(answers[0].ids[:before]) == greedy(models[0], prompts[0], before)
    assert list(answers[0].ids[before:]) == greedy(models[1], text, after)
    assert list(answers[0].ids[before:]) != greedy(models[0], text, after)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_broadcast_over_nccl_without_nccl_is_an_error_on_both_sides() -> None:
    weights = describe_tensors({}, host="127.0.0.1", port=1, world_size=2, backend="nccl")
    for side in (partial(send_weights, {}), receive_weights):
        with pytest.raises(EngineError, match="backend = 'nccl', and this torch has no NCCL"):
            side(weights)


def tensors_of_nothing(directory: Path) -> TensorWeights:
    return TensorWeights({"model.norm.weight": torch.ones(48)}, directory=str(directory))


def test_tensors_larger_than_a_bucket_go_into_several_files(tmp_path: Path) -> None:
    shared = torch.zeros(10)
    tensors = [("a", shared), ("b", shared), ("c", torch.ones(5, 4).T), ("d", torch.ones(40))]
    path = stage(TensorWeights(iter(tensors), bucket_bytes=100, directory=str(tmp_path)))
    files = sorted(Path(path).glob("*.safetensors"))
    assert [sorted(load_file(file)) for file in files] == [["a", "b"], ["c"], ["d"]]
    assert torch.equal(load_file(files[1])["c"], torch.ones(4, 5))


def test_stage_without_room_or_tensors_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="TensorWeights: expected at least one tensor"):
        stage(TensorWeights({}, directory=str(tmp_path)))
    with pytest.raises(EngineError, match="no weights can be staged in /nowhere"):
        stage(TensorWeights({}, directory="/nowhere"))
    namespace = os.stat("/proc/self/ns/pid").st_ino
    orphan = tmp_path / f"{PREFIX}{namespace}-4194305-x"  # past the largest process id
    own = tmp_path / f"{PREFIX}{namespace}-{os.getpid()}-x"
    orphan.mkdir()
    own.mkdir()
    with pytest.raises(EngineError):
        stage(TensorWeights({"a": 1}, directory=str(tmp_path)))
    assert staged(tmp_path) == [own]


#: The trainer's process: sends the tensors of a file to all that join.
SENDER = """
import sys, msgspec
from safetensors.torch import load_file
from rollout.engine.weight_broadcasting import send_weights
from rollout.engine.weights import DistributedWeights
weights = msgspec.json.decode(sys.argv[2], type=DistributedWeights)
send_weights(load_file(sys.argv[1]), weights)
"""


@pytest.mark.slow
async def test_broadcast_from_another_process_reaches_every_replica(models: list[str]) -> None:
    file = f"{models[1]}/model.safetensors"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    describe = partial(describe_tensors, load_file(file), host="127.0.0.1", port=port)
    config = RolloutConfig(
        model=ModelConfig(path=models[0]), engine=TransformersEngine(dtype="float32", replicas=2)
    )
    answers = [Generation() for _ in range(2)]
    async with open_engines(config) as pool:
        with pytest.raises(EngineError) as caught:
            await pool.update_weights(8, describe(world_size=2))
        assert str(caught.value) == (
            "world_size = 2; expected 3: the sender and 2 replicas that serve"
        )
        weights = describe(world_size=3)
        async with anyio.create_task_group() as tasks:
            text = msgspec.json.encode(weights).decode()
            tasks.start_soon(anyio.run_process, [sys.executable, "-c", SENDER, file, text])
            await pool.update_weights(8, weights)
        pool.drain("engine-0")
        await ask(pool, [5, 6, 7], answers[0], 40)
        pool.resume("engine-0")
        pool.drain("engine-1")
        await ask(pool, [5, 6, 7], answers[1], 40)
    for answer in answers:
        assert answer.versions == [[8, 40]]
        assert list(answer.ids) == greedy(models[1], [5, 6, 7], 40)


def test_stage_leaves_weights_of_another_container_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
