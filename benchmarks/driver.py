"""What a generation costs the driver.

    python benchmarks/driver.py --ours [--n 256] [--scope generate] [--backend asyncio]

The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import anyio

from driver_cases.measuring import calibration_ms
from driver_cases.ours import Plan, run_rounds
from driver_cases.workload import TURNS, save_workload

ROOT = Path(__file__).parents[1]
WORKLOAD = ROOT / "build" / "driver" / "workload"


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the numbers over the rounds; what is the same in all of them as it is."""
    return {
        key: round(statistics.median(each[key] for each in rounds), 4)
        if isinstance(value, float)
        else value
        for key, value in rounds[0].items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ours", action="store_true", help="our side alone, in this process")
    parser.add_argument("--n", type=int, default=256, help="trajectories, all in flight at once")
    parser.add_argument("--turns", type=int, default=TURNS, help="that call a tool")
    parser.add_argument("--rounds", type=int, default=5, help="after one that does not count")
    parser.add_argument("--scope", choices=("stream", "generate"), default="stream")
    parser.add_argument("--barrier", choices=("rounds", "first", "none"), default="rounds")
    parser.add_argument("--backend", choices=("trio", "asyncio"), default="trio")
    asked = parser.parse_args()
    save_workload(WORKLOAD)
    plan = Plan(
        directory=str(WORKLOAD),
        n=asked.n,
        turns=asked.turns,
        scope=asked.scope,
        barrier=asked.barrier,
    )
    before = calibration_ms()
    rounds = anyio.run(
        functools.partial(run_rounds, plan, asked.rounds), backend=asked.backend
    )
    for each in rounds:
        print(json.dumps(each), file=sys.stderr, flush=True)
    calibration = [round(ms, 2) for ms in (before, calibration_ms())]
    print(json.dumps({**medians(rounds), "calibration_ms": calibration}))


if __name__ == "__main__":
    main()
