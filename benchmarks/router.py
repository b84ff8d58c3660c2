"""Makespan and prefix hits of routing policies, and what one decision costs.

Fixed workloads on the simulated engine, 8 and 64 replicas: every strategy of ours, verl's policy
and those of smg, the SGLang model gateway. They are agents of several turns and single turns, with
one replica at half speed, on mixed machines and on equal ones; no policy is told which. A makespan
is given as a multiple of the lower bound max(work ÷ capacity, longest trajectory alone), which
nothing can reach: a batch as large as full capacity needs slows every trajectory down, and not all
trajectories are admitted at once. Intervals are 95 %, over the seeds.

The router's constants were tuned on the workloads of the split `train` only; those of `test` have
other shapes, machines and seeds, and are measured.

The engines are the simulated engine's own batching code, driven by a heap of events. A first run of
each workload is repeated on `SimulatedCore` itself in virtual time, and both must agree.

The last line is the result as JSON: `us_per_decision_256`, for each workload and policy
`makespan_over_bound` and `prefix_hit`, the `split`, `against_best_other` (the default's makespan
over that of the best other policy, paired by seed, with its interval), `behind`, the workloads
where that is more than 3 % above 1 beyond the interval, and `equal_replicas_gain`: on equal
replicas, with agents of 2 to 8 turns in groups and heavy tails, the best other policy's makespan
over the default's, with its interval.

    python benchmarks/router.py [--seeds 8] [--quick]
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import time  # noqa: TID251  (what is measured here is CPU time)
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from intervals import mean_and_half, ratio_and_half
from routing.ours import STRATEGIES, Ours
from routing.peers import PEERS
from routing.simulation import Outcome, Simulation, lower_bound_s
from routing.virtual import run_in_virtual_time
from routing.workloads import EQUAL, TEST, TRAIN, WORKLOADS, trial_of

from rollout.engine.core import EngineLoad
from rollout.engine.routing import Router

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT = STRATEGIES[0]
SIZES = (8, 64)
POLICIES: dict[str, Callable[[int, int], Any]] = {
    **{name: functools.partial(Ours, name) for name in STRATEGIES},
    **PEERS,
}
#: Of the cost of a decision: replicas, requests in flight on each, decisions of a run, runs.
REPLICAS, DEPTH, DECISIONS, RUNS = 256, 8, 8192, 15
#: Further behind the best other policy than this, beyond the interval, the default is too slow.
MOST_BEHIND = 1.03
#: Replicas of the runs that are repeated in virtual time.
CHECKED = 4


def us_per_decision() -> float:
    """Median over runs of the CPU microseconds of one `assign`, first turns and later ones.

    Between the runs everything is released, so that each begins with the same load.
    """
    router = Router()
    names = [f"engine-{number}" for number in range(REPLICAS)]
    for name in names:
        router.add(name, 4096)
    requests = [(f"{number}", f"{number // 16}") for number in range(REPLICAS * DEPTH)]
    assign, now, costs = router.assign, 0.0, []
    for run in range(RUNS):
        held = []
        start = time.process_time()
        for index in range(DECISIONS):
            session, group = requests[index % len(requests)]
            held.append(assign(session, group_id=group, prompt_tokens=2048, max_new_tokens=4096))
        costs.append((time.process_time() - start) / DECISIONS * 1e6)
        now += 1.0
        for name in names:
            running = DECISIONS // REPLICAS
            load = EngineLoad(running=running, generated_tokens=1000 * run, measured_at_s=now)
            router.report(name, load, now=now)
        for dispatch in held:
            assert dispatch is not None
            router.release(dispatch, generated=200)
        if run % 2:  # every other run places new trajectories
            for session, _ in requests:
                router.forget(session)
    return statistics.median(costs)


def run_all(job: tuple[str, int, int]) -> tuple[str, int, dict[str, tuple[float, Outcome]]]:
    """Every policy on the same trajectories; makespans as multiples of the lower bound."""
    workload, replicas, seed = job
    trial = trial_of(workload, replicas, seed)
    bound = lower_bound_s(trial)
    results = {}
    for name, make in POLICIES.items():
        gc.disable()  # a run makes and frees a million small objects; collected between runs
        outcome = Simulation(trial, make(replicas, seed)).run()
        gc.enable()
        gc.collect()
        results[name] = outcome.makespan_s / bound, outcome
    return workload, replicas, results


def check_simulation() -> float:
    """Largest difference of the short cut from the engine in virtual time: of makespans as a share
    of them, of prefix hits as they are, for some workloads have none.
    """
    replicas, differences = CHECKED, []
    for workload in WORKLOADS:
        trial = trial_of(workload, replicas, 0)
        quick = Simulation(trial, POLICIES[DEFAULT](replicas, 0)).run()
        full = run_in_virtual_time(trial, POLICIES[DEFAULT](replicas, 0))
        differences += [
            abs(quick.makespan_s / full.makespan_s - 1),
            abs(quick.prefix_hit - full.prefix_hit),
        ]
    return max(differences)


def table(runs: dict[str, list[tuple[float, Outcome]]]) -> dict[str, dict[str, float]]:
    """What is reported of each policy on one workload."""
    rows = {}
    for name, results in runs.items():
        ratio, ratio_ci = mean_and_half([ratio for ratio, _ in results])
        hit, hit_ci = mean_and_half([outcome.prefix_hit for _, outcome in results])
        rows[name] = {
            "makespan_over_bound": round(ratio, 4),
            "makespan_ci95": round(ratio_ci, 4),
            "prefix_hit": round(hit, 4),
            "prefix_hit_ci95": round(hit_ci, 4),
            "moves": statistics.fmean(outcome.moves for _, outcome in results),
        }
    return rows


def against_best_other(runs: dict[str, list[tuple[float, Outcome]]]) -> dict[str, Any]:
    """The default's makespan over that of the best other policy, paired by seed."""
    means = {
        name: statistics.fmean(ratio for ratio, _ in results) for name, results in runs.items()
    }
    best = min((name for name in runs if name != DEFAULT), key=means.__getitem__)
    pairs = zip(runs[DEFAULT], runs[best], strict=True)
    ratio, half = ratio_and_half([ours / other for (ours, _), (other, _) in pairs])
    return {"policy": best, "ratio": round(ratio, 4), "ci95": round(half, 4)}


def equal_replicas_gain(pairs: dict[str, list[float]]) -> dict[str, Any]:
    """The makespan of each other policy over the default's on equal replicas; of the best one.

    Args:
        pairs: By policy, the ratio of each run.
    """
    gains = {name: ratio_and_half(ratios) for name, ratios in pairs.items()}
    best = min(gains, key=lambda name: gains[name][0])
    gain, half = gains[best]
    return {"policy": best, "gain": round(gain, 4), "ci95": round(half, 4)}


def behind(comparisons: dict[str, dict[str, Any]]) -> list[str]:
    """The workloads where the default is too slow, beyond the interval."""
    return [title for title, row in comparisons.items() if row["ratio"] - row["ci95"] > MOST_BEHIND]


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    """A workload's table, the fastest policy first."""
    print(f"\n{title:34}makespan ÷ bound     prefix hits      moves")
    for name, row in sorted(rows.items(), key=lambda item: item[1]["makespan_over_bound"]):
        mark = "*" if name in STRATEGIES else " "
        print(
            f"  {mark} {name:28} {row['makespan_over_bound']:7.3f} ± {row['makespan_ci95']:.3f}"
            f"     {row['prefix_hit']:.3f} ± {row['prefix_hit_ci95']:.3f}  {row['moves']:8.0f}",
            flush=True,
        )


def compare(
    seeds: int, sizes: tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, list[float]]]:
    """All workloads, sizes and policies, on all cores; each table is shown when it is complete.

    Returns:
        The tables, for each what `against_best_other` says, and the runs on equal replicas: by
        policy, its makespan over the default's.
    """
    jobs = [(name, size, seed) for size in sizes for name in WORKLOADS for seed in range(seeds)]
    runs: dict[str, list[tuple[float, Outcome]]] = defaultdict(list)
    workloads, comparisons = {}, {}
    equal: dict[str, list[float]] = defaultdict(list)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for done, (name, size, results) in enumerate(pool.map(run_all, jobs), 1):
            for policy, result in results.items():
                runs[policy].append(result)
                if name in EQUAL and policy != DEFAULT:
                    equal[policy].append(result[0] / results[DEFAULT][0])
            print(f"\r{done} of {len(jobs)}", end="", file=sys.stderr, flush=True)
            if done % seeds == 0:
                title = f"{name}_{size}"
                workloads[title] = table(runs)
                row = comparisons[title] = against_best_other(runs)
                runs.clear()
                show(title, workloads[title])
                print(f"  {DEFAULT} ÷ {row['policy']}: {row['ratio']:.3f} ± {row['ci95']:.3f}")
    print(file=sys.stderr)
    return workloads, comparisons, equal


def _arguments() -> argparse.Namespace:
    summary_, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary_, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=8, help="runs of each workload and size (default: 8)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="3 seeds, 8 replicas: a minute on 2 cores"
    )
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: expected at least 2, for an interval")
    return options


def main() -> None:
    """Measure, print tables, and the result as the last line."""
    options = _arguments()
    cost = us_per_decision()
    print(f"a decision among {REPLICAS} replicas: {cost:.2f} µs of CPU")
    difference = check_simulation()
    print(f"SimulatedCore in virtual time differs by {difference:.2%} at most")
    if difference > 0.01:
        sys.exit("the short cut is not the simulated engine any more")
    seeds, sizes = (3, SIZES[:1]) if options.quick else (options.seeds, SIZES)
    workloads, comparisons, equal = compare(seeds, sizes)
    gain = equal_replicas_gain(equal)
    print(
        f"\non equal replicas the best other policy takes {gain['gain']:.3f} ± {gain['ci95']:.3f}"
    )
    over_best = {}
    for title, rows in workloads.items():
        best = min(row["makespan_over_bound"] for row in rows.values())
        over_best[title] = round(rows[DEFAULT]["makespan_over_bound"] / best, 4)
    print(f"\n{DEFAULT} over the best of each: {over_best}")
    print(f"behind by more than {MOST_BEHIND - 1:.0%} beyond the interval: {behind(comparisons)}")
    result = {
        "us_per_decision_256": round(cost, 3),
        "virtual_time_difference": difference,
        "seeds": seeds,
        "split": {"train": TRAIN, "test": TEST},
        "against_best_other": comparisons,
        "behind": behind(comparisons),
        "equal_replicas_gain": gain,
        f"{DEFAULT}_over_best": over_best,
        "workloads": workloads,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
