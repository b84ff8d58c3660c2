"""Draws the next token of every row: temperature, penalties and truncation as in transformers.

A row is drawn with a generator seeded by (seed, absolute position), whatever else is in the batch:
a request gives the same tokens alone, in a full batch or resumed. The logits of a batch differ
from those of a single row in their last bits. ``torch.multinomial`` lets each id race with
exponential noise of its own, so in float32 that changes a draw about once in 100 000 tokens only;
inverting the cumulative distribution would add up the differences of all ids. Noise for the whole
vocabulary costs 1.5 ms a token, so a first race picks a block of ids and a second one an id of it.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rollout.engine.cores.transformers.scheduler import Draw
from rollout.engine.cores.transformers.scheduler import Sequence as Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rollout.engine.core import SamplingParams

#: Ids of a block of the vocabulary.
BLOCK = 256


def sample(logits: Tensor, rows: Sequence[Request]) -> list[Draw]:
    """One token for every row of `logits` (R, V), each at the end of its request.

    Its log-prob is ``log_softmax(logits / temperature)`` in float32 over the whole vocabulary,
    before penalties and truncation; of a greedy row, at temperature 1.
    """
    scores = logits.float()
    temperatures = [row.sampling.temperature or 1.0 for row in rows]
    centred = scores - scores.amax(-1, keepdim=True)  # keeps tiny temperatures finite
    scaled = centred / torch.tensor(temperatures, device=logits.device).unsqueeze(-1)
    weights = scaled.exp()
    totals = weights.sum(-1)
    draws = []
    for index, total in enumerate(totals.tolist()):
        if not math.isfinite(total):
            draws.append(Draw(0, math.nan))
            continue
        row, own = rows[index], scaled[index]
        log_total = math.log(total)
        token = draw_token(scores[index], weights[index], row)
        top: tuple[bytes, ...] = ()
        if row.sampling.top_log_probs:
            likeliest = own.topk(row.sampling.top_log_probs)
            ids = likeliest.indices.to(torch.int32).cpu().numpy()
            top = (ids.tobytes(), (likeliest.values - log_total).cpu().numpy().tobytes())
        draws.append(Draw(token, own[token].item() - log_total, *top))
    return draws


def draw_token(logits: Tensor, weights: Tensor, row: Request) -> int:
    """The next id, by `logits` (V,) and their `weights` (V,) at the row's temperature."""
    sampling = row.sampling
    has_penalty = (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )
    if has_penalty:
        seen = torch.from_numpy(row.ids[: row.length]).to(logits.device, torch.int64)
        logits = penalise(logits, seen, sampling, row.prompt_length)
    if sampling.temperature == 0:
        return int(logits.argmax())
    if has_penalty or sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
        weights = truncate((logits - logits.max()) / sampling.temperature, sampling).exp()
    return draw_by_weight(weights, row.seed, row.length)


def draw_by_weight(weights: Tensor, seed: int, position: int) -> int:
    """An id with a probability in proportion to its weight (V,), fixed by (seed, position)."""
    digest = hashlib.blake2b(b"%d:%d" % (seed, position), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    blocks = F.pad(weights, (0, -len(weights) % BLOCK)).view(-1, BLOCK)
    block = int(torch.multinomial(blocks.sum(-1).cpu(), 1, generator=generator))
    return block * BLOCK + int(torch.multinomial(blocks[block].cpu(), 1, generator=generator))


def penalise(
    logits: Tensor, seen: Tensor, sampling: SamplingParams, prompt_length: int = 0
) -> Tensor:
    """`logits` (V,) with the tokens in `seen` made less likely; cf. `SamplingParams`.

    Repetition first, then what is taken off for tokens of the output, as in vLLM.
    """
    own, penalty = logits[seen], sampling.repetition_penalty
    logits = logits.scatter(0, seen, torch.where(own < 0, own * penalty, own / penalty))
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = torch.bincount(seen[prompt_length:], minlength=len(logits))
        logits = logits - sampling.frequency_penalty * counts
        logits = logits - sampling.presence_penalty * (counts > 0)
    return logits


def truncate(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """`scores` (V,), scaled logits, with the tokens that may not be drawn at minus infinity.

    top_k, top_p and min_p in this order, each on what the one before has left.
    """
    if 0 < sampling.top_k < len(scores):
        least = scores.topk(sampling.top_k).values[-1]
        scores = scores.masked_fill(scores < least, -math.inf)
    if sampling.top_p < 1:  # the likeliest that together reach it: those with less above them
        probs, ids = scores.softmax(-1).sort(descending=True, stable=True)
        above = probs.cumsum(-1) - probs
        is_dropped = torch.zeros_like(scores, dtype=torch.bool)
        is_dropped[ids[above >= sampling.top_p]] = True
        scores = scores.masked_fill(is_dropped, -math.inf)
    if sampling.min_p > 0:
        least = scores.max() + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores
