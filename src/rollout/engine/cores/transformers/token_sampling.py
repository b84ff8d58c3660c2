"""Draws the next token of every row: temperature, penalties and truncation as in transformers.

A draw is an exponential race: each candidate gets a number from a hash of (seed, absolute
position), and the one with the largest weight for its number wins, which has the probability of
its weight. A first race picks a block of the vocabulary, a second one an id within it. Nothing in
it depends on what else is in the batch, so a request gives the same tokens alone, in a full batch
or resumed. The logits of a batch differ from those of a single row in their last bits; in float32
that changes the winner of a race about once in 100 000 tokens. (Inverting the cumulative
distribution adds the differences of all tokens up, and changes one in some hundreds.)
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.engine.core import SamplingParams
    from rollout.engine.cores.transformers.slots import Ids

#: Ids in a block of the vocabulary.
BLOCK = 256
#: Most nuclei lie within this many of the likeliest tokens; only the others need a full sort.
NUCLEUS_FIRST_LOOK = 512


class SamplingRow(NamedTuple):
    """What one row of logits is sampled with.

    Attributes:
        position: Of the token to be drawn, in prompt plus response.
        seen: Tokens before it, which the repetition penalty looks at.
        prompt_length: How many of these are the prompt's; the other penalties look at the rest.
    """

    sampling: SamplingParams
    seed: int
    position: int
    seen: Ids
    prompt_length: int = 0


class Top(NamedTuple):
    """The likeliest ids at a position, int32, and their log-probs, float32; packed."""

    ids: bytes
    log_probs: bytes


NO_TOP = Top(b"", b"")


class Draws(NamedTuple):
    """Sampled ids (R,) int64 and their log-probs (R,) float32, on the CPU.

    Attributes:
        top: Of each row the ids that are most likely, as many as its sampling asks for, likeliest
            first, and their log-probs.
    """

    ids: Tensor
    log_probs: Tensor
    top: list[Top]


def race_numbers(keys: Sequence[tuple[int, int]], count: int) -> npt.NDArray[np.float32]:
    """(R, count) draws from the standard exponential distribution, fixed by R (seed, position).

    The generator is SplitMix64 (Steele et al. 2014), started at a hash of each key.
    """
    digests = (hashlib.blake2b(b"%d:%d" % key, digest_size=8).digest() for key in keys)
    starts = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 1)
    bits = starts + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    numbers: npt.NDArray[np.float32] = -np.log(uniform).astype(np.float32)
    return numbers


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Draws:
    """One token for every row of `logits` (R, V), and its log-prob.

    The log-prob is ``log_softmax(logits / temperature)`` in float32 over the whole vocabulary,
    before penalties and truncation; of a greedy row, at temperature 1. A row whose logits are not
    finite has the log-prob nan.
    """
    temperatures = [row.sampling.temperature or 1.0 for row in rows]
    scores = logits.to(torch.float32, copy=True)
    scores -= scores.amax(-1, keepdim=True)  # keeps tiny temperatures finite
    scores /= torch.tensor(temperatures, device=logits.device).unsqueeze(-1)
    weights = scores.exp()
    ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    greedy = [i for i, row in enumerate(rows) if row.sampling.temperature == 0]
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature != 0]
    if greedy:
        ids[greedy] = _most_likely(logits, rows, greedy)
    if drawn:
        ids[drawn] = race(
            _truncated(logits, weights, rows, drawn),
            [(rows[i].seed, rows[i].position) for i in drawn],
        )
    totals = weights.sum(-1).log()
    log_probs = scores.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - totals
    return Draws(ids.cpu(), log_probs.cpu(), _top(scores, totals, rows))


def _top(scores: Tensor, totals: Tensor, rows: Sequence[SamplingRow]) -> list[Top]:
    found = [NO_TOP] * len(rows)
    asking = [i for i, row in enumerate(rows) if row.sampling.top_log_probs]
    if not asking:
        return found
    most = max(rows[i].sampling.top_log_probs for i in asking)
    values, ids = scores[asking].topk(most)
    log_probs = (values - totals[asking].unsqueeze(-1)).cpu().numpy()
    packed = ids.to(torch.int32).cpu().numpy()
    for at, i in enumerate(asking):
        count = rows[i].sampling.top_log_probs
        found[i] = Top(packed[at, :count].tobytes(), log_probs[at, :count].tobytes())
    return found


def penalise(row: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """`row` (V,) with the tokens in `seen` made less likely; cf. `SamplingParams`."""
    score = row[seen]
    return row.scatter(0, seen, torch.where(score < 0, score * penalty, score / penalty))


def truncate(row: Tensor, sampling: SamplingParams) -> Tensor:
    """`row` (V,) of scaled logits with the tokens that may not be drawn at minus infinity.

    top_k, top_p and min_p in this order, each on what the one before has left.
    """
    if 0 < sampling.top_k < len(row):
        least = row.topk(sampling.top_k).values[-1]
        row = row.masked_fill(row < least, -math.inf)
    if sampling.top_p < 1:
        row = _nucleus(row, sampling.top_p)
    if sampling.min_p > 0:
        least = row.max() + math.log(sampling.min_p)
        row = row.masked_fill(row < least, -math.inf)
    return row


def race(weights: Tensor, keys: Sequence[tuple[int, int]]) -> Tensor:
    """(R,) one id for each row, with a probability in proportion to its weight.

    Args:
        weights: (R, V) float32, at least 0, not normalised; ids of weight 0 are never drawn.
        keys: R pairs (seed, position) that decide the draws.
    """
    rest = -weights.shape[-1] % BLOCK
    blocks = (F.pad(weights, (0, rest)) if rest else weights).view(len(weights), -1, BLOCK)
    count = blocks.shape[1]
    numbers = torch.from_numpy(race_numbers(keys, count + BLOCK)).to(weights.device)
    block = (blocks.sum(-1) / numbers[:, :count]).argmax(-1)
    inside = blocks[torch.arange(len(blocks), device=block.device), block]
    ids: Tensor = block * BLOCK + (inside / numbers[:, count:]).argmax(-1)
    return ids


def _most_likely(logits: Tensor, rows: Sequence[SamplingRow], chosen: list[int]) -> Tensor:
    picked = logits if len(chosen) == len(rows) else logits[chosen]
    best = picked.argmax(-1)
    for at, i in enumerate(chosen):
        if _has_penalty(rows[i].sampling):
            best[at] = _penalised(logits[i], rows[i]).argmax()
    return best


def _penalised(logits: Tensor, row: SamplingRow) -> Tensor:
    """Repetition first, then what is taken off for tokens of the output, as in vLLM."""
    sampling = row.sampling
    seen = torch.from_numpy(row.seen).to(logits.device, torch.int64)
    scores = penalise(logits.float(), seen, sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = torch.bincount(seen[row.prompt_length :], minlength=len(scores))
        scores = scores - sampling.frequency_penalty * counts
        scores = scores - sampling.presence_penalty * (counts > 0)
    return scores


def _truncated(
    logits: Tensor, weights: Tensor, rows: Sequence[SamplingRow], chosen: list[int]
) -> Tensor:
    """Weights (len(chosen), V) to draw from; whole rows stay on the vectorised path."""
    picked = weights if len(chosen) == len(rows) else weights[chosen]
    special = [at for at, i in enumerate(chosen) if _is_special(rows[i].sampling)]
    if special and picked is weights:
        picked = weights.clone()  # the sums of the whole rows are still wanted
    for at in special:
        row = rows[chosen[at]]
        scores = logits[chosen[at]].float()
        if _has_penalty(row.sampling):
            scores = _penalised(scores, row)
        scores = truncate((scores - scores.max()) / row.sampling.temperature, row.sampling)
        picked[at] = scores.exp()
    return picked


def _is_special(sampling: SamplingParams) -> bool:
    is_truncated = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return is_truncated or _has_penalty(sampling)


def _has_penalty(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )


def _nucleus(row: Tensor, top_p: float) -> Tensor:
    """The likeliest tokens that together reach `top_p`: those with less than it above them."""
    probs = row.softmax(-1)
    likeliest = probs.topk(min(NUCLEUS_FIRST_LOOK, len(row)))
    values, ids = likeliest.values, likeliest.indices
    if values.sum() < top_p:
        values, ids = probs.sort(descending=True, stable=True)
    above = values.cumsum(-1) - values
    dropped = torch.ones_like(row, dtype=torch.bool)
    dropped[ids[above < top_p]] = False
    return row.masked_fill(dropped, -math.inf)
