"""`rollout check` says when a model's weights exceed the memory of the machine."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from rollout.cli import main

pytestmark = pytest.mark.process
GIB = 2**30
FACTS = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "hidden_size": 512,
    "dtype": "bfloat16",
}
CPU = ("engine.dtype=bfloat16",)
SGLANG = ("engine.kind=sglang",)
RAY = ("engine.kind=sglang", "placement.kind=ray", "placement.address=local")


def write_weights(file: Path, size: int, dtype: str = "BF16") -> None:
    """A safetensors file of this size that takes no room on the disk."""
    entry = {"dtype": dtype, "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"w": entry}).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        opened.truncate(8 + len(header) + size)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of 12 GiB in bfloat16; this machine has 16 GiB, and two GPUs of 8 GiB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rollout.cli.memory.total_bytes", lambda: 16 * GIB)
    monkeypatch.setattr("rollout.cli.gpus.count_gpus", lambda _: 8)
    monkeypatch.setattr("rollout.cli.gpus.gpu_memory", lambda _: [8 * GIB, 10 * GIB])
    monkeypatch.setattr("rollout.cli.check.is_importable", lambda _: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FACTS))
    write_weights(folder / "model.safetensors", 12 * GIB)
    return folder


def errors_of(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str]]:
    Path("mine.toml").write_text("")
    overrides = [text for each in ("model.path=model", *options) for text in ("--set", each)]
    code = main(["check", "mine.toml", *overrides])
    return code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("engine.dtype=float32",),
            "24 GiB, this machine has 16 GiB; expected a smaller model, or more memory",
        ),
        (
            (*CPU, "engine.replicas=2"),
            "12 GiB × 2 (engine.replicas) = 24 GiB, this machine has 16 GiB; "
            "expected fewer engine.replicas, or more memory",
        ),
        (("engine.device=cuda:1",), "12 GiB, its GPU has 10 GiB; expected a smaller model, "),
        (
            (*SGLANG, "engine.memory_fraction=0.5", "engine.tensor_parallel=2"),
            "12 GiB ÷ 2 GPUs = 6 GiB, engine.memory_fraction = 0.5 of 8 GiB of its GPU is 4 GiB; ",
        ),
        (RAY, "12 GiB, engine.memory_fraction = 0.85 of 8 GiB of its GPU is 6.8 GiB; "),
    ],
)
def test_cli_check_names_weights_beyond_the_memory(
    model: Path, options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (error,) = errors_of(capsys, *options)
    assert code == 2
    assert error.startswith(f"error: model.path = 'model': its weights take {said}")


@pytest.mark.parametrize(
    "options",
    [
        CPU,
        ("engine.device=cuda:2",),  # told of as a GPU that is not there
        (*SGLANG, "engine.tensor_parallel=2"),
        ("engine.kind=sglang", "placement.kind=ray", "placement.address=10.0.0.5:6379"),
        ("engine.kind=http", "engine.urls=['http://a']", "placement.kind=in_process"),
    ],
)
def test_cli_check_is_content_where_weights_fit_or_lie_elsewhere(
    model: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    write_weights(model / "tokenizer.json", 1)
    assert errors_of(capsys, *options) == (0, [])


def test_cli_check_counts_the_weights_that_an_index_names_once(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "model.safetensors").unlink()
    write_weights(model / "consolidated.safetensors", 18 * GIB)
    for name in ("a.safetensors", "b.safetensors"):
        write_weights(model / name, 9 * GIB)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    _, (error,) = errors_of(capsys, *CPU)
    assert "its weights take 18 GiB, this machine has 16 GiB" in error


def test_cli_check_takes_the_size_of_files_without_a_header(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text("{}")
    with (model / "model.safetensors").open("wb") as opened:
        opened.truncate(40 * GIB)
    _, (error,) = errors_of(capsys)
    assert "its weights take 40 GiB, this machine has 16 GiB" in error


def test_cli_check_counts_quantized_weights_as_they_are_stored(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_weights(model / "model.safetensors", 12 * GIB, "F8_E4M3")
    (model / "config.json").write_text(json.dumps({**FACTS, "quantization_config": {}}))
    assert errors_of(capsys, *CPU) == (0, [])
    assert errors_of(capsys, *SGLANG, "engine.tensor_parallel=2") == (0, [])
