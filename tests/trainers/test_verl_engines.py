"""Engines of ours in verl's training step: its trainer's weights reach them, as files."""

from __future__ import annotations

import asyncio  # noqa: TID251  (verl runs on it)
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from verl_side import (
    CUSTOM,
    DataProto,
    ScriptedServers,
    batch_of,
    make_config,
    opened,
    save_model,
    torch,
)

from rollout.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

    from rollout.integrations.verl import CheckpointManager
    from rollout.integrations.verl.weights_backend import BACKEND, DiskCheckpointEngine
    from tiny_models import TINY

SIZES = {**TINY, "vocab_size": 264, "eos_token_id": 258, "pad_token_id": 256}
ENGINE = "{kind: transformers, dtype: float32}"


def random_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("model"))
    random_model(0).save_pretrained(directory)
    return directory


class Workers:
    """The trainer's workers as verl's manager sees them, two of them, without Ray."""

    def __init__(self, directory: Path) -> None:
        self.model = random_model(0)
        self.asked: list[int] = []
        self._engines = [
            DiskCheckpointEngine(20_000, is_master, directory=str(directory))
            for is_master in (True, False)
        ]

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        assert mode == BACKEND
        self.asked.append(global_steps)
        for each in self._engines:
            weights = self.model.state_dict().items()
            asyncio.run(each.send_weights(iter(weights), global_steps=global_steps))
        return []


class Replica:
    """One of those that verl starts in any case."""

    def __init__(self) -> None:
        self.sleeps = 0

    async def sleep(self) -> None:
        self.sleeps += 1


def checkpoint_config(directory: Path | None, backend: str = BACKEND) -> Any:
    kwargs = {} if directory is None else {BACKEND: {"directory": str(directory)}}
    return SimpleNamespace(backend=backend, engine_kwargs=kwargs)


def test_engines_of_ours_generate_with_the_weights_of_the_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.get", lambda references: references)
    config = make_config(
        model,
        "actor_rollout_ref.rollout.temperature=0",
        f"{CUSTOM}={{engine: {ENGINE}}}",
        prompt=100,
        response=24,
    )
    client, workers, replica = ScriptedServers({}), Workers(tmp_path), Replica()
    batch = batch_of(["one", "two"], n=2)
    with opened(config, client) as manager:
        checkpoints = CheckpointManager(checkpoint_config(tmp_path), workers, [replica])
        checkpoints.sleep_replicas()
        assert checkpoints.update_weights(1) == {}
        first = manager.generate_sequences(batch_of(["one", "two"], n=2))
        checkpoints.sleep_replicas()
        workers.model = random_model(1)
        checkpoints.update_weights(2)
        second = manager.generate_sequences(batch)
        checkpoints.sleep_replicas()
        checkpoints.update_weights(2)  # a validation asks for the same again
        third = manager.generate_sequences(batch_of(["one", "two"], n=2))
    assert client.calls == []
    assert workers.asked == [1, 2]
    assert replica.sleeps == 1
    check_greedy(first, random_model(0))
    check_greedy(second, random_model(1))
    assert torch.equal(third.batch["responses"], second.batch["responses"])
    assert not torch.equal(first.batch["responses"], second.batch["responses"])
    assert first.non_tensor_batch["max_global_steps"].tolist() == [1] * 4
    assert second.non_tensor_batch["min_global_steps"].tolist() == [2] * 4
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-2"]
    index = json.loads((tmp_path / "step-2" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1


def check_greedy(answered: DataProto, model: Any) -> None:
    """The first token of each row is the likeliest of that model."""
    for at in range(len(answered)):
        prompt = answered.batch["prompts"][at]
        ids = prompt[answered.batch["attention_mask"][at, :100].bool()]
        with torch.no_grad():
            likeliest = model(ids[None]).logits[0, -1].argmax()
        assert answered.batch["responses"][at, 0] == likeliest


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (checkpoint_config(Path("x"), "naive"), "checkpoint_engine.backend = 'naive': expected"),
        (checkpoint_config(None), "engine_kwargs.rollout_disk.directory = None: expected"),
    ],
)
def test_wrong_checkpoint_engines_are_refused_by_name(model: Path, config: Any, said: str) -> None:
    simulated = (
        "{engine: {kind: simulated}, placement: {kind: in_process}, model: {path: simulated}}"
    )
    with opened(make_config(model, f"{CUSTOM}={simulated}"), ScriptedServers({})):
        with pytest.raises(ConfigError) as caught:
            CheckpointManager(config, None, [])
    assert said in str(caught.value)


def test_checkpoint_manager_without_engines_of_ours_is_refused(model: Path) -> None:
    with opened(make_config(model), ScriptedServers({})):
        with pytest.raises(ConfigError, match="no engines of rollout in this process"):
            CheckpointManager(checkpoint_config(Path("x")), None, [])
