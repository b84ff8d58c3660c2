"""TRL's real `GRPOTrainer` on prompts with images, against the embedded engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed here: .venv-trl has it")
pytest.importorskip("torchvision", reason="processors of transformers need it")

import torch
from datasets import Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import GRPOConfig, GRPOTrainer

import vision_models
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    LocalProcessPlacement,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    TransformersEngine,
)
from rollout.integrations.trl import rollout_func

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def rows() -> list[dict[str, Any]]:
    """A prompt with an image, and one with another of another size."""
    asked = [{"role": "user", "content": "What is this?"}]
    return [
        {"prompt": asked, "image": vision_models.picture(1)},
        {"prompt": asked, "image": vision_models.picture(2, 130, 50)},
    ]


def checksums(**given: Any) -> list[float]:
    """A reward that differs within a group."""
    return [float(sum(ids) % 97) for ids in given["completion_ids"]]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_trl_trains_on_rows_with_images_at_the_engines_probabilities(
    tmp_path: Path, family: str
) -> None:
    """Importance ratios say whether its forward pass saw the same pixels at the same places."""
    directory = vision_models.save(family, tmp_path / "model")
    config = RolloutConfig(
        model=ModelConfig(path=directory),
        engine=TransformersEngine(dtype="float32", max_running=4),
        placement=LocalProcessPlacement(),
        lengths=LengthsConfig(prompt=512, response=16),
        agent=AgentConfig(name="single_turn"),
        sampling=SamplingConfig(temperature=1.0),
    )
    data = rows()
    arguments = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        per_device_train_batch_size=2 * len(data),
        num_generations=2,
        max_completion_length=16,
        learning_rate=1e-3,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    with rollout_func(config) as completions:
        trainer = GRPOTrainer(
            model=AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32),
            processing_class=AutoProcessor.from_pretrained(directory, padding_side="left"),
            reward_funcs=checksums,
            rollout_func=completions,
            args=arguments,
            train_dataset=Dataset.from_list(data),
        )
        trainer.train()
    logged = [each for each in trainer.state.log_history if "reward" in each]
    assert len(logged) == 2
    for step in logged:
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-3)
        assert step["sampling/sampling_logp_difference/max"] < 1e-2
        assert step["grad_norm"] > 0
