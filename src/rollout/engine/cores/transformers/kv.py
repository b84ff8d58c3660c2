"""The KV cache: keys and values of every slot, in one pair of tensors for each layer.

All slots of a layer have the same capacity, which grows when the longest request needs it. Keys
lie with their positions last: on a CPU in bfloat16 the product of a few queries with the keys of a
long context is then four times as fast as with positions in the middle.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

#: Capacity grows in multiples of this. An odd number of cache lines keeps the rows of a head from
#: falling into the same few sets of a CPU's cache, as powers of two would.
CAPACITY_STEP = 544


class LayerCache:
    """Keys (S, H, D, C) and values (S, H, C, D') of one layer: S slots, H heads, capacity C.

    Memory starts as zeros: what lies beyond a row's length is multiplied by a weight of zero, and
    must be finite for that.
    """

    __slots__ = ("keys", "values")

    def __init__(self, slots: int, capacity: int, key: Tensor, value: Tensor) -> None:
        heads, key_width, value_width = key.shape[1], key.shape[-1], value.shape[-1]
        self.keys = _zeros(key, slots, heads, key_width, capacity)
        self.values = _zeros(value, slots, heads, capacity, value_width)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` positions; what is there stays."""
        keys, values = self.keys, self.values
        old = keys.shape[-1]
        self.keys = _zeros(keys, *keys.shape[:3], capacity)
        self.keys[..., :old] = keys
        self.values = _zeros(values, *values.shape[:2], capacity, values.shape[-1])
        self.values[:, :, :old] = values

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions ``[start, stop)`` of one slot to another."""
        self.keys[target, :, :, start:stop] = self.keys[source, :, :, start:stop]
        self.values[target, :, start:stop] = self.values[source, :, start:stop]

    def clear(self, slot: int) -> None:
        """Forget a slot whose numbers are not finite."""
        self.keys[slot].zero_()
        self.values[slot].zero_()


class KeyValueCache:
    """The caches of all layers, made when a layer first runs, since only it knows its shapes."""

    def __init__(self, *, slots: int, context_length: int) -> None:
        self._slots = slots
        self._context_length = context_length
        self._capacity = min(CAPACITY_STEP, context_length)
        self._layers: dict[int, LayerCache] = {}

    @property
    def capacity(self) -> int:
        """Positions that every slot has room for."""
        return self._capacity

    @property
    def layers(self) -> int:
        """Layers that have run."""
        return len(self._layers)

    def layer(self, index: int, key: Tensor, value: Tensor) -> LayerCache:
        """The cache of a layer; `key` and `value` (1, H, N, D) show its shapes and its device."""
        layer = self._layers.get(index)
        if layer is None:
            layer = self._layers[index] = LayerCache(self._slots, self._capacity, key, value)
        return layer

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` positions in every layer."""
        if length <= self._capacity:
            return
        wanted = max(length, self._capacity + self._capacity // 2)
        rounded = -(-wanted // CAPACITY_STEP) * CAPACITY_STEP
        self._capacity = min(rounded, max(self._context_length, length))
        for layer in self._layers.values():
            layer.grow(self._capacity)

    def release(self) -> None:
        """Free the memory; it is made again when layers run."""
        self._layers.clear()
        self._capacity = min(CAPACITY_STEP, self._context_length)

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions ``[start, stop)`` from one slot to another in every layer."""
        for layer in self._layers.values():
            layer.copy(source, target, start, stop)

    def clear(self, slot: int) -> None:
        """Forget one slot in every layer."""
        for layer in self._layers.values():
            layer.clear(slot)


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros of the type of `like`; on a CPU, memory is taken as far as something is written.

    Most slots stay empty for a while, and some for ever.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


def copies(layer: LayerCache, slot: int, length: int, groups: int) -> tuple[Tensor, Tensor]:
    """Keys and values (1, heads, length, D) of one slot, each head repeated for its group."""
    keys = layer.keys[slot, :, :, :length].transpose(1, 2)
    values = layer.values[slot, :, :length]
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    return keys.unsqueeze(0), values.unsqueeze(0)
