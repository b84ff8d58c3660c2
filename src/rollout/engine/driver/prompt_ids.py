"""What is looked at of a prompt before it is sent."""

from __future__ import annotations

import numpy as np

from rollout.errors import EngineError
from rollout.token_prefix import TokenPrefix


def check_ids(prompt: bytes | TokenPrefix, vocab_size: int) -> None:
    """An id outside the vocabulary can kill an engine; it does not leave the driver.

    Args:
    prompt: Packed int32, or a prefix, of which only what was not checked before is looked at.
    vocab_size: Of the engine; 0 where it does not say.

    Raises:
    EngineError: An id is outside; names it and its position.
    """
    prefix = prompt if isinstance(prompt, TokenPrefix) else None
    start = prefix.checked if prefix is not None else 0
    data = prompt if isinstance(prompt, bytes) else prompt.packed(start)
    ids, most = np.frombuffer(data, dtype=np.int32), vocab_size
    # Negative ones are the largest as unsigned.
    if len(ids) and ids.view(np.uint32).max() >= (most or 2**31):
        at = int(np.argmax((ids < 0) | (ids >= (most or 2**31))))
        of = f" of {most} ids" if most else ""
        raise EngineError(
            f"token id {ids[at]} at position {start + at} is outside the engine's vocabulary" + of
        )
    if prefix is not None:
        prefix.checked = start + len(ids)
