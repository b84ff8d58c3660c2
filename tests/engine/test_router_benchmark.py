"""The routing benchmark's own parts, and a share of what it measures."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from slow_cases import slow_after

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
benchmark: Any = importlib.import_module("router")
virtual: Any = importlib.import_module("routing.virtual")

DEFAULT = "estimated_seconds"


@pytest.mark.parametrize("workload", slow_after(1, benchmark.WORKLOADS))
def test_simulation_is_what_the_simulated_core_does(workload: str) -> None:
    trial = benchmark.trial_of(workload, 2, 0)
    make = benchmark.POLICIES[DEFAULT]
    short_cut = benchmark.Simulation(trial, make(2, 0)).run()
    whole = virtual.run_in_virtual_time(trial, make(2, 0))
    assert short_cut.makespan_s == pytest.approx(whole.makespan_s)
    assert (short_cut.prefix_hit, short_cut.moves) == (whole.prefix_hit, whole.moves)


def results(workload: str, seeds: int) -> dict[str, list[tuple[float, Any]]]:
    """Every policy's outcomes on 8 replicas."""
    runs = [benchmark.run_all((workload, 8, seed))[2] for seed in range(seeds)]
    return {name: [run[name] for run in runs] for name in runs[0]}


@pytest.mark.slow
@pytest.mark.parametrize("workload", benchmark.WORKLOADS)
def test_default_policy_is_behind_no_other_beyond_the_interval(workload: str) -> None:
    comparison = benchmark.against_best_other(results(workload, seeds=8))
    assert benchmark.behind({workload: comparison}) == [], comparison
