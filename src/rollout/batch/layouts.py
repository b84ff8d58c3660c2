"""Rows laid out as rectangles, or one after the other as jagged nested tensors.

Shapes: B rows, P prompt width, R response width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rollout.chat.transcript import NO_EXPERT, NO_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.batch.rows import Arrays, Row

#: Which part of a row has a value for each token of it.
PROMPT, RESPONSE, BOTH = "prompt", "response", "both"
#: By key: that part, the type, and what padded positions hold; ids hold the padding token.
KEYS = {
    "prompts": (PROMPT, torch.int64, None),
    "responses": (RESPONSE, torch.int64, None),
    "response_mask": (RESPONSE, torch.int64, 0),
    "input_ids": (BOTH, torch.int64, None),
    "attention_mask": (BOTH, torch.int64, 0),
    "position_ids": (BOTH, torch.int64, 0),
    "rollout_log_probs": (RESPONSE, torch.float32, 0),
    "weight_versions": (RESPONSE, torch.int32, NO_VERSION),
    "token_rewards": (RESPONSE, torch.float32, 0),
    "routed_experts": (BOTH, torch.int16, NO_EXPERT),
}


def pad_rows(
    rows: Sequence[Row], arrays: Sequence[Arrays], widths: tuple[int, int], pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Rectangles: prompts padded on the left, responses on the right.

    Args:
        rows, arrays: Of the batch.
        widths: (P, R).
        pad_token_id: In padded positions of ids.
    """
    prompt, response = widths
    width = {PROMPT: prompt, RESPONSE: response, BOTH: prompt + response}
    tensors = {}
    for key, inner in _find_keys(arrays).items():
        part, dtype, filler = KEYS[key]
        filler = pad_token_id if filler is None else filler
        shape = (len(rows), width[part], *inner)
        tensor = torch.full(shape, filler, dtype=dtype, device="cpu")
        values = tensor.numpy()
        for at, (row, own) in enumerate(zip(rows, arrays, strict=True)):
            start = 0 if part is RESPONSE else prompt - row.prompt
            stop = start + _count_tokens(row)[part]
            values[at, start:stop] = own.get(key, 1)
        tensors[key] = tensor
    if tensors["position_ids"].dim() == 3:  # of an M-RoPE family: (B, 3 or 4, P + R)
        tensors["position_ids"] = tensors["position_ids"].transpose(1, 2).contiguous()
    return tensors


def pack_rows(rows: Sequence[Row], arrays: Sequence[Arrays]) -> dict[str, torch.Tensor]:
    """Jagged nested tensors: the rows one after the other, without padding.

    Keys of equal lengths share their offsets: torch then lets them be combined.
    """
    counts = [_count_tokens(row) for row in rows]
    offsets = {
        part: torch.tensor([0, *np.cumsum([each[part] for each in counts])], device="cpu").long()
        for part in (PROMPT, RESPONSE, BOTH)
    }
    tensors = {}
    for key, inner in _find_keys(arrays).items():
        part, dtype, _ = KEYS[key]
        total = int(offsets[part][-1])
        values = torch.ones((total, *inner), dtype=dtype, device="cpu")
        if rows and key in arrays[0]:
            np.concatenate([own[key] for own in arrays], out=values.numpy(), casting="unsafe")
        tensors[key] = torch.nested.nested_tensor_from_jagged(values, offsets[part])
    return tensors


def _count_tokens(row: Row) -> dict[str, int]:
    return {PROMPT: row.prompt, RESPONSE: row.response, BOTH: row.prompt + row.response}


def _find_keys(arrays: Sequence[Arrays]) -> dict[str, tuple[int, ...]]:
    """The keys of a batch, each with the shape of one token's value."""
    optional = ("token_rewards", "routed_experts")
    first = arrays[0] if arrays else {}
    keys = [key for key in KEYS if key in first or key not in optional]
    return {key: first[key].shape[1:] if key in first else () for key in keys}
