"""What is looked at of token ids before they are sent, and when they have come.

An id outside the vocabulary can kill an engine, and a trainer.
"""

from __future__ import annotations

import numpy as np

from rollout.errors import EngineError
from rollout.token_prefix import TokenPrefix

#: Negative ids are the largest of all.
_UNSIGNED = np.dtype(np.uint32)


def outside(ids: bytes, vocab_size: int, start: int = 0) -> str:
    """Which id is not of the vocabulary, in words; empty where all are.

    Args:
        ids: Packed int32.
        vocab_size: Of the engine; 0 where it does not say, and only negative ids are outside.
        start: Position of the first one.
    """
    if not ids:
        return ""
    values, end = np.frombuffer(ids, _UNSIGNED), vocab_size or 2**31
    if values.item(values.argmax()) < end:
        return ""
    at = int(np.argmax(values >= end))
    of = f" of {vocab_size} ids" if vocab_size else ""
    return (
        f"token id {values.view(np.int32)[at]} at position {start + at} is outside the engine's "
        f"vocabulary{of}"
    )


def check_ids(prompt: bytes | TokenPrefix, vocab_size: int) -> None:
    """Let a prompt pass; of a prefix, only what was not checked before is looked at.

    Args:
        prompt: Packed int32, or a prefix.
        vocab_size: As for `outside`.

    Raises:
        EngineError: An id is outside; names it and its position.
    """
    if not isinstance(prompt, TokenPrefix):
        fault = outside(prompt, vocab_size)
    elif not (fault := outside(prompt.packed(prompt.checked), vocab_size, prompt.checked)):
        prompt.checked = prompt.length
    if fault:
        raise EngineError(fault)
