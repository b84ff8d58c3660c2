"""Attention of a padded batch over the KV cache, as transformers' models call it.

A batch is R rows of T tokens, each row the next tokens of one slot, padded on the left. All of it
is one call of ``scaled_dot_product_attention``. The function is registered as an attention backend,
which transformers' models take by name, so the model's own forward does everything else.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

BACKEND = "rollout_slots"

#: The capacity of the cache, and the positions that a batch looks at, are multiples of this.
STEP = 64
#: Arguments by which models ask for kinds of attention that this function does not compute.
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


class Span(NamedTuple):
    """Positions ``[start, stop)`` of the sequence in `slot`, computed in one batch."""

    slot: int
    start: int
    stop: int


class KeyValueCache:
    """Keys and values (S, H, C, D) of every layer: S slots, H heads, capacity C.

    A layer's are made when it first runs, since only it knows their shapes. The capacity grows with
    the longest sequence. Memory starts as zeros, and all of it stays finite: what lies beyond a
    row's length is multiplied by a weight of zero.
    """

    def __init__(self, *, slots: int, context_length: int) -> None:
        self._slots = slots
        self._context_length = context_length
        self._capacity = min(STEP, context_length)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # those that have run

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The cache of a layer; `key` and `value` (R, H, T, D) show its shapes and its device."""
        if index not in self.layers:
            self.layers[index] = (self._make(key), self._make(value))
        return self.layers[index]

    def reserve(self, length: int) -> int:
        """Make room for sequences of `length` positions; the capacity."""
        if length > self._capacity:
            wanted = max(length, 2 * self._capacity)
            self._capacity = max(min(wanted, self._context_length), length)
            for index, old in self.layers.items():
                grown = tuple(self._make(each) for each in old)
                for new, each in zip(grown, old, strict=True):
                    new[:, :, : each.shape[2]] = each
                self.layers[index] = (grown[0], grown[1])
        return self._capacity

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions ``[start, stop)`` of one slot to another."""
        for layer in self.layers.values():
            for content in layer:
                content[target, :, start:stop] = content[source, :, start:stop]

    def clear(self, slot: int) -> None:
        """Forget a slot whose numbers are not finite."""
        for keys, values in self.layers.values():
            keys[slot].zero_()
            values[slot].zero_()

    def release(self) -> None:
        """Free the memory; it is made again when layers run."""
        self.layers.clear()
        self._capacity = min(STEP, self._context_length)

    def _make(self, like: Tensor) -> Tensor:
        """Zeros of the heads, width and type of `like` (any, H, any, D)."""
        shape = (self._slots, like.shape[1], self._capacity, like.shape[3])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        # NumPy's zeros take memory only as far as something is written; most slots stay empty.
        content = np.zeros(math.prod(shape) * like.element_size(), np.uint8)
        return torch.from_numpy(content).view(like.dtype).view(shape)


class BatchLayout:
    """How the tokens of one batch lie in its rows and in the KV cache.

    Attributes:
        position_ids: (R, T): where each token stands in its sequence; of padding, 0.
    """

    def __init__(
        self, spans: Sequence[Span], cache: KeyValueCache, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._cache = cache
        stops = torch.tensor([span.stop for span in spans], device=device)
        counts = torch.tensor([span.stop - span.start for span in spans], device=device)
        slots = torch.tensor([span.slot for span in spans], device=device)
        longest, tokens = int(stops.max()), int(counts.max())
        self._width = min(-(-longest // STEP) * STEP, cache.reserve(longest))
        before_end = torch.arange(tokens, 0, -1, device=device)
        self.position_ids = (stops.unsqueeze(-1) - before_end).clamp(min=0)
        # Tokens that are no padding: their rows, columns, slots and positions.
        self._rows, self._columns = (before_end <= counts.unsqueeze(-1)).nonzero(as_tuple=True)
        self._slots = slots[self._rows]
        self._positions = self.position_ids[self._rows, self._columns]
        # The slots that are looked at: a slice, whose memory is read as it lies, unless most of it
        # would be computed in vain. Of a slice, `_own` are the rows of the batch.
        first, last = int(slots.min()), int(slots.max()) + 1
        is_dense = last - first <= 2 * len(spans)
        self._seen: slice | Tensor = slice(first, last) if is_dense else slots
        self._own = slots - first if is_dense else torch.arange(len(spans), device=device)
        self._count = last - first if is_dense else len(spans)
        is_hidden = torch.arange(self._width, device=device) > self.position_ids.unsqueeze(-1)
        bias = torch.zeros(self._count, *is_hidden.shape[1:], dtype=dtype, device=device)
        bias[self._own] = bias[self._own].masked_fill(is_hidden, -math.inf)
        self._bias = bias.unsqueeze(1)

    def attend(
        self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Store `key` and `value` (R, H, T, D) and attend: (R, T, heads, D')."""
        keys, values = self._cache.layer(layer_index, key, value)
        keys[self._slots, :, self._positions] = key[self._rows, :, self._columns]
        values[self._slots, :, self._positions] = value[self._rows, :, self._columns]
        rows, heads, tokens, width = query.shape
        groups = heads // key.shape[1]
        # The heads of a group share keys and values: they are further queries of one head.
        queries = query.new_zeros(self._count, key.shape[1], groups * tokens, width)
        queries[self._own] = query.reshape(rows, key.shape[1], groups * tokens, width)
        attended = F.scaled_dot_product_attention(
            queries,
            keys[self._seen, :, : self._width],
            values[self._seen, :, : self._width],
            attn_mask=self._bias if tokens == 1 else self._bias.repeat(1, 1, groups, 1),
            scale=scale,
        )
        return attended[self._own].reshape(rows, heads, tokens, -1).transpose(1, 2)


def attend_slots(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: BatchLayout,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a transformers model calls in place of its attention; see `BatchLayout.attend`."""
    unmet = [name for name in UNSUPPORTED if others.get(name) is not None]
    if unmet or attention_mask is not None:
        what = ", ".join(unmet) or "an attention mask of its own"
        raise NotImplementedError(f"{type(module).__name__} asks for {what}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer_index: Any = module.layer_idx
    return layout.attend(layer_index, query, key, value, scale), None
