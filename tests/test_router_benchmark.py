"""The routing benchmark's own parts, and a share of what it measures."""

from __future__ import annotations

import importlib
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
benchmark: Any = importlib.import_module("router")
virtual: Any = importlib.import_module("routing.virtual")

DEFAULT = "estimated_seconds"


@pytest.mark.parametrize("policy", benchmark.POLICIES)
def test_simulation_of_every_policy_ends_and_repeats_itself_and_beats_no_bound(policy: str) -> None:
    sessions = benchmark.sessions_of("lognormal_turns", 2, 0)
    make = benchmark.POLICIES[policy]
    once, again = (benchmark.Simulation(sessions, 2, make(2, 0)).run() for _ in range(2))
    assert once == again
    assert once.makespan_s > benchmark.lower_bound_s(sessions, 2)
    assert 0 < once.prefix_hit < 1


@pytest.mark.parametrize("workload", benchmark.WORKLOADS)
def test_simulation_is_what_the_simulated_core_does(workload: str) -> None:
    sessions = benchmark.sessions_of(workload, 2, 0)
    make = benchmark.POLICIES[DEFAULT]
    short_cut = benchmark.Simulation(sessions, 2, make(2, 0)).run()
    whole = virtual.run_in_virtual_time(sessions, 2, make(2, 0))
    assert short_cut.makespan_s == pytest.approx(whole.makespan_s)
    assert (short_cut.prefix_hit, short_cut.moves) == (whole.prefix_hit, whole.moves)


def over_best(workload: str, seeds: int) -> float:
    """Makespan of the default policy as a multiple of the best one's, on 8 replicas."""
    runs = [benchmark.run_all((workload, 8, seed))[2] for seed in range(seeds)]
    means = {name: statistics.fmean(run[name][0] for run in runs) for name in runs[0]}
    return means[DEFAULT] / min(means.values())


@pytest.mark.full
def test_default_policy_is_the_best_of_all() -> None:
    assert over_best("bimodal", seeds=1) == 1.0


@pytest.mark.full
@pytest.mark.parametrize("workload", benchmark.WORKLOADS)
def test_default_policy_is_within_a_hundredth_of_the_best(workload: str) -> None:
    assert over_best(workload, seeds=8) <= 1.01


@pytest.mark.full
def test_json_of_a_workload_has_what_is_reported_of_each_policy() -> None:
    runs = [benchmark.run_all(("lognormal_turns", 2, seed))[2] for seed in range(2)]
    rows = benchmark.table({name: [run[name] for run in runs] for name in runs[0]})
    assert set(rows) == set(benchmark.POLICIES)
    assert {"makespan_over_bound", "prefix_hit"} <= set(rows[DEFAULT])
