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


@pytest.mark.parametrize("policy", slow_after(3, benchmark.POLICIES))
def test_simulation_of_every_policy_ends_and_repeats_itself_and_beats_no_bound(policy: str) -> None:
    trial = benchmark.trial_of("lognormal_turns", 2, 0)
    make = benchmark.POLICIES[policy]
    once, again = (benchmark.Simulation(trial, make(2, 0)).run() for _ in range(2))
    assert once == again
    assert once.makespan_s > benchmark.lower_bound_s(trial)
    assert 0 < once.prefix_hit < 1


@pytest.mark.parametrize("workload", slow_after(3, benchmark.WORKLOADS))
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


def test_behind_names_who_is_slower_by_more_than_three_percent_and_the_interval() -> None:
    def runs(*ratios: float) -> dict[str, list[tuple[float, None]]]:
        others = {"verl": [(2.0, None)] * len(ratios), "smg_random": [(9.0, None)] * len(ratios)}
        return {DEFAULT: [(2.0 * ratio, None) for ratio in ratios], **others}

    cases = {
        "slower": runs(1.10, 1.11, 1.12),
        "unsure": runs(0.90, 1.11, 1.32),
        "a little slower": runs(1.02, 1.02, 1.02),
        "faster": runs(0.80, 0.81, 0.82),
    }
    comparisons = {name: benchmark.against_best_other(case) for name, case in cases.items()}
    assert {row["policy"] for row in comparisons.values()} == {"verl"}
    assert comparisons["slower"]["ratio"] == pytest.approx(1.11, abs=1e-3)
    assert benchmark.behind(comparisons) == ["slower"]


def test_workloads_held_out_share_no_shape_machines_or_draws_with_those_tuned_on() -> None:
    train, test = set(benchmark.TRAIN), set(benchmark.TEST)
    assert train | test == set(benchmark.WORKLOADS)
    assert not train & test

    def what(name: str) -> set[Any]:
        sessions = benchmark.trial_of(name, 2, 0).sessions
        machines = benchmark.WORKLOADS[name].machines(8)
        unlike = {machines} if len(set(machines)) > 1 else set()  # there is one way to be alike
        return {*unlike, *(session.ids for session in sessions)}

    tuned_on = set().union(*map(what, train))
    assert not any(what(name) & tuned_on for name in test)


@pytest.mark.slow
def test_json_of_a_workload_has_what_is_reported_of_each_policy() -> None:
    rows = benchmark.table(results("lognormal_turns", seeds=2))
    assert set(rows) == set(benchmark.POLICIES)
    assert {"makespan_over_bound", "prefix_hit"} <= set(rows[DEFAULT])
