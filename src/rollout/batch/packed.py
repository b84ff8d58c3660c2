"""Rows without padding, one after the other: the values of jagged nested tensors.

Shapes: of all rows, T tokens, S of them in prompts and N in responses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rollout.chat.transcript import NO_EXPERT

if TYPE_CHECKING:
    from rollout.batch.rows import Rows, Tokens
    from rollout.batch.tensor_memory import TensorMemory

#: Which of the three lengths of a row a key has.
PROMPT, RESPONSE, WHOLE = "prompt", "response", "whole"
_LENGTHS = {
    "prompts": PROMPT,
    "responses": RESPONSE,
    "response_mask": RESPONSE,
    "input_ids": WHOLE,
    "attention_mask": WHOLE,
    "position_ids": WHOLE,
    "rollout_log_probs": RESPONSE,
    "weight_versions": RESPONSE,
    "token_rewards": RESPONSE,
    "routed_experts": WHOLE,
}
_DTYPES = {
    "rollout_log_probs": torch.float32,
    "weight_versions": torch.int32,
    "token_rewards": torch.float32,
    "routed_experts": torch.int16,
}


class PackedTensors:
    """Values of all rows, filled some rows at a time.

    Attributes:
        arrays: By the names that they have in `RolloutBatch.tensors`.
        offsets: (B + 1,) where each row begins, for each key; keys of equal lengths share them:
            torch then lets them be combined.
    """

    def __init__(self, rows: Rows, memory: TensorMemory) -> None:
        self._offsets = {
            PROMPT: _offsets(rows.prompts),
            RESPONSE: _offsets(rows.responses),
            WHOLE: _offsets(rows.prompts + rows.responses),
        }
        names = dict.fromkeys(_LENGTHS)
        if not rows.has_token_rewards:
            del names["token_rewards"]
        if rows.expert_shape is None:
            del names["routed_experts"]
        self.offsets = {name: self._offsets[_LENGTHS[name]] for name in names}
        self.arrays: dict[str, npt.NDArray[Any]] = {
            name: memory.empty(self._shape(name, rows), _DTYPES.get(name, torch.int64))
            for name in names
        }

    def fill(self, rows: Rows, tokens: Tokens) -> None:
        """Write the rows that `tokens` are of."""
        parts = {name: array[self._values(name, tokens)] for name, array in self.arrays.items()}
        lengths = tokens.prompts + tokens.responses
        begins = np.cumsum(lengths) - lengths
        positions = np.arange(len(tokens.ids)) - np.repeat(begins, lengths)
        in_prompt = positions < np.repeat(tokens.prompts, lengths)
        parts["input_ids"][:] = tokens.ids
        parts["prompts"][:] = tokens.ids[in_prompt]
        parts["responses"][:] = tokens.ids[~in_prompt]
        parts["attention_mask"].fill(1)
        if rows.positions is None:
            parts["position_ids"][:] = positions
        else:
            for begin, (row, ids) in zip(begins, tokens.by_row(rows), strict=True):
                place = parts["position_ids"][begin : begin + len(ids)]
                place[:] = rows.positions.of(row, ids).T
        parts["response_mask"][:] = tokens.sampled
        parts["rollout_log_probs"].fill(0)
        parts["rollout_log_probs"][tokens.sampled] = tokens.log_probs
        parts["weight_versions"][:] = tokens.versions
        if tokens.token_rewards is not None:
            parts["token_rewards"][:] = tokens.token_rewards
        if rows.expert_shape is not None:
            for begin, count, row in zip(
                begins, lengths, range(len(rows))[tokens.rows], strict=True
            ):
                experts = rows.experts(row)
                place = parts["routed_experts"][begin : begin + count]
                place[:] = NO_EXPERT if experts is None else experts

    def _shape(self, name: str, rows: Rows) -> tuple[int, ...]:
        inner: tuple[int, ...] = rows.expert_shape or () if name == "routed_experts" else ()
        if name == "position_ids" and rows.positions is not None:
            inner = (rows.positions.count,)
        return (int(self._offsets[_LENGTHS[name]][-1]), *inner)

    def _values(self, name: str, tokens: Tokens) -> slice:
        offsets = self.offsets[name]
        return slice(int(offsets[tokens.rows.start]), int(offsets[tokens.rows.stop]))


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
