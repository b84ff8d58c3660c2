"""Turns the GGUF file of a package into a model directory that loads in a second or two.

Nothing that transformers does here, or in `quiet_transformers`, writes to the terminal.
"""

from __future__ import annotations

import io
import stat
import warnings
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
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


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, no advice and no warnings inside; everything as before outside.

    The settings are transformers' own and hold for the whole process while inside.
    """
    log: Any = transformers.utils.logging
    verbosity, has_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if has_bars:
            log.enable_progress_bar()
