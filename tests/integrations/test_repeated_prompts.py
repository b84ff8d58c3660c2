"""Prompts that a trainer repeats, run as groups."""

from __future__ import annotations

import functools
from typing import Any

import anyio
import pytest

import rollout
from rollout.integrations.repeated_prompts import grouped
from rollout.testing import Scenario
from rollout.types import Prompt


def says(at: int) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": f"say {at}"}], uid=str(at))


@pytest.mark.parametrize("keys", ["aabbb", "aabb"])
def test_repeated_groups_of_several_sizes_metrics_are_those_of_all(keys: str) -> None:
    scenario = Scenario(seed=1).reply("say", "Certainly.")
    repeated = grouped(list(keys), says, {})
    with rollout.open_rollout_blocking(scenario.config(), reward=_ten) as runtime:
        run = functools.partial(repeated.run, runtime, step=1, validate=False)
        trajectories, metrics = anyio.run(run)
    assert [each.uid for each in trajectories] == [f"prompt-{'ab'.index(key)}" for key in keys]
    assert metrics["outcomes/completed"] == len(keys)
    lengths = [each.transcript.generated_length for each in trajectories]
    assert metrics["tokens/generated"] == sum(lengths)
    assert metrics["reward/mean"] == 10.0
    assert metrics["loop_lag_s/max"] >= 0.0


def _ten(trajectory: Any) -> float:
    return 10.0
