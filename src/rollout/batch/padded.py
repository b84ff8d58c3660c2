"""Rows as rectangles: prompts padded on the left, responses on the right.

Shapes: B rows, P prompt width, R response width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rollout.chat.transcript import NO_EXPERT, NO_VERSION

if TYPE_CHECKING:
    from rollout.batch.rows import Rows, Tokens
    from rollout.batch.tensor_memory import TensorMemory


class PaddedTensors:
    """Arrays of one shape for all rows, filled some rows at a time.

    Each piece of work is for many rows at once, because that lets other threads run meanwhile.

    Attributes:
        arrays: By the names that they have in `RolloutBatch.tensors`.
        width: Places of a row, P + R.
    """

    def __init__(
        self, rows: Rows, prompt: int, response: int, pad_token_id: int, memory: TensorMemory
    ) -> None:
        size, empty = len(rows), memory.empty
        self.width = prompt + response
        self._prompt = prompt
        self._pad = pad_token_id
        whole, answer = (size, self.width), (size, response)
        self.arrays: dict[str, npt.NDArray[Any]] = {
            "prompts": empty((size, prompt)),
            "responses": empty(answer),
            "response_mask": empty(answer),
            "input_ids": empty(whole),
            "attention_mask": empty(whole),
            "position_ids": empty(whole),
            "rollout_log_probs": empty(answer, torch.float32),
            "weight_versions": empty(answer, torch.int32),
        }
        if rows.positions is not None:
            self.arrays["position_ids"] = empty((size, rows.positions.count, self.width))
        if rows.has_token_rewards:
            self.arrays["token_rewards"] = empty(answer, torch.float32)
        if rows.expert_shape is not None:
            self.arrays["routed_experts"] = empty((*whole, *rows.expert_shape), torch.int16)

    def fill(self, rows: Rows, tokens: Tokens) -> None:
        """Write the rows that `tokens` are of."""
        parts = {name: array[tokens.rows] for name, array in self.arrays.items()}
        first = (self._prompt - tokens.prompts)[:, np.newaxis]
        behind = (self._prompt + tokens.responses)[:, np.newaxis]
        places = np.arange(self.width)
        is_token = (places >= first) & (places < behind)
        parts["attention_mask"][:] = is_token
        if rows.positions is None:
            # A row is contiguous, so that this is cumsum(attention) - 1 on it.
            np.subtract(places, first, out=parts["position_ids"])
            parts["position_ids"] *= is_token
        else:
            parts["position_ids"].fill(0)
            for at, (row, ids) in enumerate(tokens.by_row(rows)):
                begin = int(first[at, 0])
                place = parts["position_ids"][at, :, begin : begin + len(ids)]
                place[:] = rows.positions.of(row, ids)
        ids = parts["input_ids"]
        ids.fill(self._pad)
        ids[is_token] = tokens.ids
        parts["prompts"][:] = ids[:, : self._prompt]
        parts["responses"][:] = ids[:, self._prompt :]
        self._fill_responses(parts, tokens, is_token[:, self._prompt :])
        if rows.expert_shape is not None:
            parts["routed_experts"].fill(NO_EXPERT)
            for at, row in enumerate(range(len(rows))[tokens.rows]):
                experts, begin = rows.experts(row), int(first[at, 0])
                if experts is not None:
                    parts["routed_experts"][at, begin : begin + len(experts)] = experts

    @staticmethod
    def _fill_responses(
        parts: dict[str, npt.NDArray[Any]], tokens: Tokens, is_token: npt.NDArray[np.bool_]
    ) -> None:
        is_sampled = np.zeros(is_token.shape, dtype=np.bool_)
        is_sampled[is_token] = tokens.sampled
        parts["response_mask"][:] = is_sampled
        parts["rollout_log_probs"].fill(0)
        parts["rollout_log_probs"][is_sampled] = tokens.log_probs
        parts["weight_versions"].fill(NO_VERSION)
        parts["weight_versions"][is_token] = tokens.versions
        if tokens.token_rewards is not None:
            parts["token_rewards"].fill(0)
            parts["token_rewards"][is_token] = tokens.token_rewards
