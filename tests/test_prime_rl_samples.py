"""What prime-rl is given keeps its contract; `tests/trainers` has its own types take it."""

from __future__ import annotations

from typing import Any

import pytest

import every_outcome as given
from rollout.integrations.verifiers import training_samples
from trainers.contracts import prime_rl as contract


def check_samples(types: Any) -> None:
    """Those of every outcome, as structs of these types."""
    rows = given.rows().rows
    samples = training_samples(rows, env_name="doors", temperature=0.7, types=types)
    contract.check(samples, types.TrainingSample)
    # Of nine rows, three have nothing to learn.
    assert len(samples) == 6
    first = samples[1]  # before it is its side conversation
    assert first.token_ids == [10, 11, 12, 13, 60, 61, 2, 50, 51, 52, 61, 62, 2]
    assert first.mask == [False] * 4 + [True] * 3 + [False] * 3 + [True] * 3
    assert first.logprobs[3:8] == [0.0, -0.5, -0.25, -0.125, 0.0]
    assert first.temperatures == [0.7] * 13
    mean = (1.0 + 0.0 + 0.5 + 0.25) / 4
    assert first.advantages[4] == pytest.approx(1.0 - mean)
    assert first.advantages[7] == 0.0
    assert first.routed_experts.shape == [13, given.LAYERS, given.TOP_K]
    assert samples[4].routed_experts is None


def test_training_samples_take_advantages_that_are_given() -> None:
    rows = given.rows().rows
    samples = training_samples(rows, env_name="", advantages=[2.0] * len(rows), types=contract)
    assert all(max(sample.advantages) == 2.0 for sample in samples)


def test_training_samples_of_every_outcome_keep_the_contract() -> None:
    check_samples(contract)
