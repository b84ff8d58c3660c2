"""A model of a few thousand parameters and the simulated engine's tokenizer, for `GRPOTrainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rollout.testing import simulated_tokenizer


def save_model(directory: Path) -> Path:
    """A model and its tokenizer, whose ids are bytes; its template is ChatML."""
    tokenizer = simulated_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def trainer_of(
    directory: Path,
    completions: Any,
    rows: list[dict[str, Any]],
    reward_funcs: Any,
    *,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> GRPOTrainer:
    """A trainer of two generations a prompt, all prompts a step."""
    given = {
        "output_dir": str(directory / "out"),
        "max_steps": 1,
        "per_device_train_batch_size": 2 * len(rows),
        "per_device_eval_batch_size": 2 * len(rows),
        "num_generations": 2,
        "max_completion_length": 512,
        "learning_rate": 0.5,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "dataloader_pin_memory": False,
        **(arguments or {}),
    }
    return GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32),
        processing_class=options.pop("tokenizer", None) or AutoTokenizer.from_pretrained(directory),
        reward_funcs=reward_funcs,
        rollout_func=completions,
        args=GRPOConfig(**given),
        train_dataset=Dataset.from_list(rows),
        **options,
    )
