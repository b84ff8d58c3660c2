"""The arithmetic of GPUs and memory that ``rollout check`` shows."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from rollout.cli.public_models import published_facts
from rollout.cli.sizing import context_tokens, sizing_lines
from rollout.config import (
    LengthsConfig,
    ModelConfig,
    RayPlacement,
    RolloutConfig,
    SGLangEngine,
    TransformersEngine,
    load_config,
)
from rollout.errors import ConfigError

FACTS = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 3 · 2³⁰ parameters, of which the file has the header only."""
    (tmp_path / "config.json").write_text(json.dumps(FACTS))
    size = 2 * 3 * 2**30
    header = json.dumps({"w": {"dtype": "BF16", "shape": [], "data_offsets": [0, size]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return tmp_path


def config(model: Path, gpus: float = 2.0, **engine: Any) -> RolloutConfig:
    return RolloutConfig(
        model=ModelConfig(path=str(model)),
        engine=SGLangEngine(**{"replicas": 4, "tensor_parallel": 2, "max_running": 32, **engine}),
        placement=RayPlacement(gpus_per_replica=gpus),
        lengths=LengthsConfig(prompt=1024, response=3072),
    )


def test_gpus_weights_and_cache_are_counted(model: Path) -> None:
    assert sizing_lines(config(model)) == [
        ("gpus", "4 × 2 (engine.replicas × engine.tensor_parallel) = 8 GPUs"),
        ("weights", "3.22 billion × 2 bytes ÷ 2 GPUs = 3 GiB for each replica and GPU"),
        (
            "kv cache",
            "2 × 4 layers × 2 heads × 64 × 2 bytes = 2 KiB a token; 32 requests of 4096 tokens: "
            "0.25 GiB for each replica",
        ),
        (
            "example",
            "of a GPU of 80 GB, engine.memory_fraction = 0.85 leaves 60.3 GiB beside the weights: "
            "63260522 tokens, 15444 such requests",
        ),
    ]


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (
            "auto",
            "4 bytes = 12 GiB for each replica; half of it where the CPU computes in bfloat16",
        ),
        ("bfloat16", "2 bytes = 6 GiB for each replica"),
    ],
)
def test_weights_of_an_embedded_engine_are_counted_as_a_cpu_holds_them(
    model: Path, dtype: Any, said: str
) -> None:
    embedded = RolloutConfig(
        model=ModelConfig(path=str(model)), engine=TransformersEngine(dtype=dtype)
    )
    label, text = sizing_lines(embedded)[0]
    assert (label, text) == ("weights", f"3.22 billion × {said}")


def test_weights_that_do_not_fit_are_said_so(model: Path) -> None:
    *_, (label, text) = sizing_lines(config(model, memory_fraction=0.01))
    assert (label, text) == (
        "example",
        "a GPU of 80 GB cannot hold the weights; raise engine.tensor_parallel",
    )


def test_public_model_that_is_not_here_is_counted_by_its_published_figures() -> None:
    lines = sizing_lines(load_config("conf/sglang_one_gpu.py"))
    assert lines == [
        ("gpus", "1 × 1 (engine.replicas × engine.tensor_parallel) = 1 GPUs"),
        (
            "weights",
            "1.54 billion × 2 bytes = 2.88 GiB for each replica, by its published figures",
        ),
        (
            "kv cache",
            "2 × 28 layers × 2 heads × 128 × 2 bytes = 28 KiB a token; 256 requests of 8192 "
            "tokens: 56 GiB for each replica",
        ),
        (
            "example",
            "of a GPU of 80 GB, engine.memory_fraction = 0.85 leaves 60.5 GiB beside the weights: "
            "2263970 tokens, 276 such requests",
        ),
    ]


SHIPPED = sorted(Path("conf").glob("sglang_*.py"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_gpu_configuration_has_its_arithmetic(path: Path) -> None:
    lines = dict(sizing_lines(load_config(path)))
    assert {"weights", "kv cache"} <= lines.keys()
    assert "memory" not in lines
    if "cpu" not in path.stem:
        assert "cannot hold" not in lines["example"]


def test_published_figures_are_found_in_any_case_and_of_no_stranger() -> None:
    facts = published_facts("qwen/qwen2.5-7b-instruct")
    assert facts is not None
    assert (facts.parameters, facts.context) == (7_615_616_512, 32_768)
    assert published_facts("Qwen/Qwen2.5-7B-Instruct-finetuned") is None


def test_model_that_nobody_knows_is_unknown() -> None:
    whole = load_config("conf/sglang_one_gpu.py", ["model.path=somebody/model"])
    assert ("memory", "unknown: the model's files are not on this machine") in sizing_lines(whole)


def test_context_is_that_of_the_engine_or_of_the_model(model: Path) -> None:
    assert context_tokens(config(model)) is None
    (model / "config.json").write_text(json.dumps({**FACTS, "max_position_embeddings": 4096}))
    assert context_tokens(config(model)) == 4096 - 6
    assert context_tokens(config(model, context_length=1000)) == 1000 - 6
    assert context_tokens(config(model, context_length=10_000)) == 4096 - 6
    assert context_tokens(load_config("conf/quickstart.py")) == 8192


def test_seats_with_fewer_gpus_than_shards_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError) as failure:
        RolloutConfig(
            model=ModelConfig(path=str(model)),
            engine=SGLangEngine(replicas=2, tensor_parallel=4),
            placement=RayPlacement(colocate=("node:0", "node:1,2,3,4")),
        )
    assert failure.value.faults == (
        "placement.colocate[0] = 'node:0': expected 4 GPUs for engine.tensor_parallel = 4",
    )


def test_seats_over_several_machines_share_the_shards(model: Path) -> None:
    def on(*gpu_slots: str) -> RolloutConfig:
        return RolloutConfig(
            model=ModelConfig(path=str(model)),
            engine=SGLangEngine(tensor_parallel=4),
            placement=RayPlacement(colocate=gpu_slots, machines_per_replica=2),
        )

    assert on("a:0,1", "b:0,1").engine.replicas == 1
    with pytest.raises(ConfigError, match=r"colocate\[1\] = 'b:0,0': expected 2 GPUs for engine"):
        on("a:0,1", "b:0,0")


def test_colocated_replicas_ask_for_no_gpus() -> None:
    (line, *_) = sizing_lines(load_config("conf/sglang_colocated.py"))
    assert line == ("gpus", "none of their own: 2 replicas share those of the trainer")


def test_model_without_known_figures_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"d_model": 3}')
    assert ("memory", "unknown: the model's files are not on this machine") in sizing_lines(
        config(tmp_path)
    )


def test_fewer_gpus_than_shards_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError) as failure:
        config(model, gpus=1.0)
    assert "placement.gpus_per_replica = 1.0: expected at least engine.tensor_parallel = 2" in str(
        failure.value
    )


def test_one_shard_may_have_a_part_of_a_gpu(model: Path) -> None:
    assert config(model, gpus=0.5, tensor_parallel=1).placement.kind == "ray"
