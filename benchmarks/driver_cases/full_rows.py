"""The rows whose padding is compared: every position is used, as both sides get them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 128_000
SAMPLED, OBSERVED = 448, 64
#: Tensors that both sides make, equal for rows without padding.
SHARED = (
    *("prompts", "responses", "response_mask"),
    *("input_ids", "attention_mask", "position_ids", "rollout_log_probs"),
)


def ids_of_row(row: int, count: int) -> list[int]:
    """Ids as large as real vocabularies have them."""
    return [(7919 * position + 104_729 * row) % VOCABULARY for position in range(count)]


def spans(response: int) -> Iterator[tuple[bool, int, int]]:
    """Of each span whether it was sampled, its start and its stop; the first and the last were."""
    turn = OBSERVED + SAMPLED
    stop = response - (response - 1) // turn * turn
    yield True, 0, stop
    while stop < response:
        yield False, stop, stop + OBSERVED
        yield True, stop + OBSERVED, stop + turn
        stop += turn


def tensors_digest(tensors: Any) -> str:
    """Of every value in the tensors that both sides make."""
    digest = hashlib.sha256()
    for name in SHARED:
        tensor = tensors[name]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
