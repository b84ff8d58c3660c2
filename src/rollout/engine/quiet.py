"""Keeps transformers from writing to a terminal that belongs to other output."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import transformers
from transformers import modeling_gguf_pytorch_utils

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, no advice and no warnings inside; everything as before outside.

    The settings are transformers' own and hold for the whole process while inside.
    """
    log: Any = transformers.utils.logging
    gguf_module: Any = modeling_gguf_pytorch_utils
    verbosity, has_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    bar = gguf_module.tqdm
    log.set_verbosity_error()
    log.disable_progress_bar()
    gguf_module.tqdm = lambda items, **_: items  # this one bar ignores the setting
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gguf_module.tqdm = bar
        log.set_verbosity(verbosity)
        if has_bars:
            log.enable_progress_bar()
