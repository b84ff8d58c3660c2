"""Draws, penalties and truncation of the embedded engine, against transformers' own processors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rollout.engine.core import GenerationRequest, SamplingParams
from rollout.engine.cores.transformers.sampling import (
    draw_by_weight,
    penalise,
    sample,
    truncate,
)
from rollout.engine.cores.transformers.scheduler import Sequence

VOCABULARY = 1500


def logits(seed: int, rows: int = 1, scale: float = 3.0, vocabulary: int = VOCABULARY):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * scale


def params(**values) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **values)


def row(position: int = 0, seed: int = 1, seen=(), **values) -> Sequence:
    """A request that is through its prompt: the ids `seen`, repeated up to `position`."""
    length = max(position, len(seen))
    prompt = np.resize(np.asarray(seen or [0], dtype=np.int32), length).tobytes()
    request = GenerationRequest(request_id="r", prompt_ids=prompt, sampling=params(**values))
    return Sequence(request, context_length=length + 1, eos_ids=(), seed=seed)


def ids_of(draws) -> list[int]:
    return [draw.id for draw in draws]


def kept(scores: torch.Tensor) -> set[int]:
    return set(torch.isfinite(scores).nonzero().flatten().tolist())


@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.2, 3.0),
    top_k=st.one_of(st.just(-1), st.integers(1, 200)),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.3),
    penalty=st.floats(0.5, 2.0),
)
def test_sample_with_every_filter_draws_from_transformers_distribution(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    scores, seen = logits(seed), [1, 5, 5, 700]
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    processors.append(TemperatureLogitsWarper(temperature))
    if top_k > 0:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        processors.append(MinPLogitsWarper(min_p))
    allowed = kept(processors(torch.tensor([seen]), scores.clone())[0])
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    penalised = penalise(scores[0], torch.tensor(seen), params(repetition_penalty=penalty))
    scaled = (penalised - penalised.max()) / temperature
    ours = kept(truncate(scaled, params(**values)))
    # Ids right at the edge may fall to either side: the two add probabilities up differently.
    probabilities = scaled.softmax(-1)
    assert sum(probabilities[list(ours ^ allowed)].tolist()) < 2e-6
    rows = [
        row(position, seen=seen, repetition_penalty=penalty, **values) for position in range(12)
    ]
    assert set(ids_of(sample(scores.expand(12, -1), rows))) <= ours


def test_sample_greedy_row_takes_the_argmax_at_temperature_one() -> None:
    scores = logits(8, rows=2)
    draws = sample(scores, [row(temperature=0), row(temperature=0, top_k=3, seed=9)])
    assert ids_of(draws) == scores.argmax(-1).tolist()
    expected = scores.log_softmax(-1).amax(-1)
    log_probs = torch.tensor([draw.log_prob for draw in draws])
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)


def test_sample_greedy_row_with_penalty_avoids_the_seen_token() -> None:
    scores = torch.tensor([[4.0, 3.0, -1.0]])
    draws = sample(scores, [row(temperature=0, seen=[0], repetition_penalty=2.0)])
    assert ids_of(draws) == [1]
    assert draws[0].log_prob == pytest.approx(scores.log_softmax(-1)[0, 1].item(), abs=1e-6)


def test_sample_log_probs_are_of_the_scaled_distribution_before_truncation() -> None:
    scores = logits(9)
    rows = [
        row(temperature=0.7, top_k=5, top_p=0.9, seen=[2], repetition_penalty=1.5, position=at)
        for at in range(20)
    ]
    draws = sample(scores.expand(20, -1), rows)
    expected = (scores[0] / 0.7).log_softmax(-1)[ids_of(draws)]
    log_probs = torch.tensor([draw.log_prob for draw in draws])
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)


def test_sample_row_is_the_same_alone_and_in_any_batch() -> None:
    scores = logits(10, rows=6)
    kinds = [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 4}, {"temperature": 0.5}, {}]
    rows = [row(position=at, seed=at * 7, **kind) for at, kind in enumerate(kinds)]
    together = sample(scores, rows)
    backwards = sample(scores.flip(0), rows[::-1])
    alone = [sample(scores[at : at + 1], rows[at : at + 1])[0].id for at in range(6)]
    assert ids_of(together) == alone == ids_of(backwards)[::-1]


def test_sample_tiny_temperature_is_finite_and_takes_the_most_likely() -> None:
    scores = logits(12)
    draws = sample(scores, [row(temperature=1e-30)])
    assert draws[0].id == scores.argmax().item()
    assert draws[0].log_prob == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_sample_row_that_is_not_finite_has_no_log_prob(value: float) -> None:
    scores = logits(13, rows=2)
    scores[0, 5] = value
    draws = sample(scores, [row(), row()])
    assert math.isnan(draws[0].log_prob)
    assert math.isfinite(draws[1].log_prob)


def test_draws_are_in_proportion_to_the_weights() -> None:
    vocabulary = 256
    weights = logits(14, vocabulary=vocabulary, scale=1.0)[0].exp()
    weights[2:4] = 0
    count = 2_000
    ids = torch.tensor([draw_by_weight(weights, 3, position) for position in range(count)])
    seen = torch.bincount(ids, minlength=vocabulary).double()
    expected = (weights.double() / weights.sum()) * count
    assert seen[2:4].tolist() == [0, 0]
    drawn = expected > 0
    statistic = ((seen - expected)[drawn] ** 2 / expected[drawn]).sum().item()
    freedom = int(drawn.sum()) - 1
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


def test_sample_most_likely_ids_come_with_the_log_probs_of_the_whole_distribution() -> None:
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]])
    rows = [row(temperature=2.0, top_k=1, top_log_probs=3), row(), row(top_log_probs=1)]
    draws = sample(scores, rows)
    expected = torch.log_softmax(scores[0] / 2.0, -1)
    assert np.frombuffer(draws[0].top_ids, np.int32).tolist() == [1, 3, 2]
    np.testing.assert_allclose(
        np.frombuffer(draws[0].top_log_probs, np.float32), expected[[1, 3, 2]], rtol=1e-6
    )
    assert draws[1][2:] == (b"", b"")
    assert np.frombuffer(draws[2].top_ids, np.int32).tolist() == [3]
