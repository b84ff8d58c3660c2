"""Turns the GGUF file of a package into a model directory that loads in a second or two."""

from __future__ import annotations

import io
import stat
from contextlib import redirect_stderr
from typing import TYPE_CHECKING

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from rollout.engine.quiet import quiet_transformers

if TYPE_CHECKING:
    from pathlib import Path


def convert_gguf(source: Path, chat_template: str, directory: Path) -> None:
    """Write the model in bfloat16 and its tokenizer, with `chat_template`, to a new directory.

    GGUF does not carry SmolLM's rule that every digit is a token of its own; it is put back.
    """
    # One progress bar of transformers' ignores the setting.
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
        tokenizer.chat_template = chat_template
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    mode = stat.S_IMODE((directory / "config.json").stat().st_mode)
    for weights in directory.glob("*.safetensors"):
        weights.chmod(mode)  # safetensors makes files for their owner alone
