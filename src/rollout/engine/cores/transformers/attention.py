"""Attention of one step over the slots of the KV cache, as transformers' models call it.

A step is one packed row of tokens (1, N): first single tokens of running requests, in the order of
their slots, then parts of prompts. Single tokens are computed together in runs of neighbouring
slots; each part of a prompt by itself. The function is registered as an attention backend, which
transformers' models take by name, so the model's own forward does everything else.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from rollout.engine.cores.transformers.kv import KeyValueCache, LayerCache, copies

if TYPE_CHECKING:
    from collections.abc import Sequence

BACKEND = "rollout_slots"

#: Widths of runs are multiples of this, so that few shapes reach the CPU's matrix kernels, which
#: are built for each shape.
WIDTH_STEP = 64
#: A further run costs about as much as attending to this many positions (measured on a CPU).
RUN_COST = 600
#: Rows of the longest run; bounds the time that finding the runs takes.
MAX_RUN = 64
#: Arguments by which models ask for kinds of attention that this function does not compute.
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


class StepSpan(NamedTuple):
    """Positions ``[start, stop)`` of the sequence in `slot`, computed in this step."""

    slot: int
    start: int
    stop: int


class Run(NamedTuple):
    """Single tokens ``[first, last)`` of a step, whose slots are neighbours.

    Attributes:
        slot: Of the first one.
        width: Positions that are looked at.
        hidden: (R, 1, width) bool: positions beyond a row's length.
    """

    first: int
    last: int
    slot: int
    width: int
    hidden: Tensor


class StepPart(NamedTuple):
    """Tokens ``[first, last)`` of a step: a part of one prompt.

    `bias` (T, L), of the model's dtype, is None where the part is the beginning of its sequence.
    """

    first: int
    last: int
    span: StepSpan
    bias: Tensor | None


class StepLayout:
    """How the tokens of one step lie in the packed row and in the KV cache."""

    def __init__(
        self,
        spans: Sequence[StepSpan],
        cache: KeyValueCache,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`spans`: single tokens first, in the order of their slots, then parts of prompts."""
        singles = [span for span in spans if span.stop - span.start == 1]
        cache.reserve(max(span.stop for span in spans))
        self._cache = cache
        self._slots = torch.tensor([span.slot for span in singles], device=device)
        self._starts = torch.tensor([span.start for span in singles], device=device)
        self._runs = [_run(run, singles, cache.capacity, device) for run in split_runs(singles)]
        self._parts = _parts(spans, len(singles), device, dtype)
        positions = [torch.arange(span.start, span.stop) for span in spans]
        self.position_ids = torch.cat(positions).unsqueeze(0).to(device)

    def attend(
        self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Store `key` and `value` (1, H, N, D) and attend: (1, N, heads, D')."""
        layer = self._cache.layer(layer_index, key, value)
        self._store(layer, key[0], value[0])
        heads, count = query.shape[1:3]
        groups = heads // key.shape[1]
        out = query.new_empty(count, heads, value.shape[-1])
        if self._runs:
            # (N, heads, D): the heads of a group are neighbours, so rows and groups fold together.
            rows = query[0].transpose(0, 1) * scale
            for run in self._runs:
                _attend_run(run, layer, rows[run.first : run.last], groups, out)
        for part in self._parts:
            keys, values = copies(layer, part.span.slot, part.span.stop, groups)
            attended = F.scaled_dot_product_attention(
                query[:, :, part.first : part.last],
                keys,
                values,
                attn_mask=part.bias,
                is_causal=part.bias is None,
                scale=scale,
            )
            out[part.first : part.last] = attended[0].transpose(0, 1)
        return out.unsqueeze(0)

    def _store(self, layer: LayerCache, key: Tensor, value: Tensor) -> None:
        singles = len(self._slots)
        if singles:
            layer.keys[self._slots, :, :, self._starts] = key[:, :singles].transpose(0, 1)
            layer.values[self._slots, :, self._starts] = value[:, :singles].transpose(0, 1)
        for first, last, (slot, start, stop), _ in self._parts:
            layer.keys[slot, :, :, start:stop] = key[:, first:last].transpose(1, 2)
            layer.values[slot, :, start:stop] = value[:, first:last]


def split_runs(singles: Sequence[StepSpan]) -> list[tuple[int, int]]:
    """Runs ``[first, last)`` of neighbouring slots that attend to few positions in vain.

    A run is as wide as its longest row. The split is the cheapest one for `RUN_COST`.
    """
    costs, befores = [0.0], [0]
    for last in range(1, len(singles) + 1):
        best, before, width = math.inf, last - 1, 0
        for first in range(last - 1, max(last - 1 - MAX_RUN, -1), -1):
            if first < last - 1 and singles[first].slot + 1 != singles[first + 1].slot:
                break
            width = max(width, singles[first].stop)
            cost = costs[first] + width * (last - first) + RUN_COST
            if cost < best:
                best, before = cost, first
        costs.append(best)
        befores.append(before)
    runs = []
    last = len(singles)
    while last:
        runs.append((befores[last], last))
        last = befores[last]
    return runs[::-1]


def _run(
    run: tuple[int, int], singles: Sequence[StepSpan], capacity: int, device: torch.device
) -> Run:
    first, last = run
    lengths = torch.tensor([span.stop for span in singles[first:last]], device=device)
    widest = max(span.stop for span in singles[first:last])
    width = min(-(-widest // WIDTH_STEP) * WIDTH_STEP, capacity)
    hidden = torch.arange(width, device=device) >= lengths.view(-1, 1, 1)
    return Run(first, last, singles[first].slot, width, hidden)


def _parts(
    spans: Sequence[StepSpan], first: int, device: torch.device, dtype: torch.dtype
) -> list[StepPart]:
    parts = []
    for span in spans[first:]:
        last = first + span.stop - span.start
        bias = None
        if span.start:
            columns = torch.arange(span.stop, device=device)
            later = columns > torch.arange(span.start, span.stop, device=device).unsqueeze(-1)
            bias = torch.zeros(later.shape, dtype=dtype, device=device)
            bias.masked_fill_(later, -math.inf)
        parts.append(StepPart(first, last, span, bias))
        first = last
    return parts


def _attend_run(run: Run, layer: LayerCache, rows: Tensor, groups: int, out: Tensor) -> None:
    """Attention of R single tokens; `rows` (R, heads, D) is scaled, `out` (N, heads, D')."""
    count, heads, _ = rows.shape
    slots = slice(run.slot, run.slot + count)
    keys = layer.keys[slots, :, :, : run.width].flatten(0, 1)
    values = layer.values[slots, :, : run.width].flatten(0, 1)
    scores = torch.bmm(rows.reshape(len(keys), groups, -1), keys)
    scores.view(count, heads, -1).masked_fill_(run.hidden, -math.inf)
    attended = torch.bmm(scores.softmax(-1), values)
    out[run.first : run.last] = attended.view(count, heads, -1)


def attend_slots(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    slot_layout: StepLayout,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a transformers model calls in place of its attention; see `StepLayout.attend`.

    Raises:
        NotImplementedError: The model asks for a kind of attention that is not computed here.
    """
    asked = [name for name in UNSUPPORTED if others.get(name) is not None]
    if asked or attention_mask is not None:
        what = ", ".join(asked) or "an attention mask of its own"
        raise NotImplementedError(f"{type(module).__name__} asks for {what}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer_index: Any = module.layer_idx
    return slot_layout.attend(layer_index, query, key, value, scale), None


def register_backend() -> None:
    """Make the backend known to transformers; again is harmless."""
    AttentionInterface.register(BACKEND, attend_slots)
