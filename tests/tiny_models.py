"""Small random language models that the embedded engine can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

#: The sizes of one, by the names that most architectures give them.
TINY: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_model(config: Any, directory: Path, seed: int = 0) -> str:
    """Draw the weights of a model, and save it; returns the directory."""
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)
