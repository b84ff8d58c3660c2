"""What a turn costs through the gateway, beside the same agent natively.

1000 trajectories of 4 generations of about 190 tokens, tools that answer at once with 100
tokens, on an engine in another process that answers at once. Natively they are run by the tool
agent; through the gateway by clients in another process, which send chat completions and run the
tools. Both make the same tokens, which is checked (`equal_tokens`). Sides take turns in processes
of their own; each figure is the median over the rounds; progress goes to stderr.

    python benchmarks/gateway.py [--quick]

The last line is the result as JSON:

    cpu_ratio          CPU of the driver for a turn through the gateway over natively, asyncio with
                       uvloop; cpu_ratio_trio on trio, where HTTP is served in a thread
    p99_ms_1000        latency of a turn as the client sees it, with 1000 connections open and one
                       request at a time, less that of a generation natively: of the 99th
                       percentiles; p50_ms_1000 of the medians
    match_us_85_turns  CPU to recognise a conversation of 85 turns, its body read already;
                       read_us_85_turns to read it
    forks_false, matches_false  turns that are not recognised, and that are taken for others, among
                       those that clients changed
    details            medians by side
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from driver_cases.alternation import alternate, medians, ratio, say
from driver_cases.side_process import SideProcess
from driver_cases.workload import save_workload
from gateway_cases.matching import errors, match_us

WORKLOAD = Path(__file__).parents[1] / "build" / "driver" / "workload"
#: Turns that call a tool; one more ends.
TOOL_TURNS = 3
#: What is to be reached, at most.
PROMISED = {"cpu_ratio": 3.0, "cpu_ratio_trio": 3.0, "forks_false": 0, "matches_false": 0}


def compared(backend: str, n: int, rounds: int) -> dict[str, Any]:
    """The same agent natively and through the gateway."""
    options = {
        "directory": str(WORKLOAD),
        "n": n,
        "turns": TOOL_TURNS,
        "barrier": "none",
        "backend": backend,
    }
    sides = {
        way: SideProcess("gateway_cases.side", {**options, "way": way})
        for way in ("native", "http")
    }
    try:
        found = alternate({way: side.ask for way, side in sides.items()}, rounds)
        probes = alternate(
            {way: partial(side.ask, probe=True) for way, side in sides.items()}, rounds, warm_ups=0
        )
    finally:
        for side in sides.values():
            side.close()
    probed = {way: medians(figures) for way, figures in probes.items()}
    digests = {each["digest"] for side in found.values() for each in side}
    return {
        "cpu_ratio": ratio(found["http"], found["native"], "cpu_ms"),
        "equal_tokens": len(digests) == 1,
        "p50_ms": probed["http"]["p50_ms"] - probed["native"]["p50_ms"],
        "p99_ms": probed["http"]["p99_ms"] - probed["native"]["p99_ms"],
        "details": {
            way: medians(figures) | {name: probed[way][name] for name in ("p50_ms", "p99_ms")}
            for way, figures in found.items()
        },
    }


def main() -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer trajectories and rounds")
    parser.add_argument("--n", type=int, help="trajectories (1000; --quick: 100)")
    parser.add_argument("--rounds", type=int, help="of each side that count (5; --quick: 2)")
    asked = parser.parse_args()
    if importlib.util.find_spec("uvloop") is None:
        parser.error(
            "uvloop is missing, on which asyncio is measured: pip install 'rollout-rl[bench]'"
        )
    n = asked.n or (100 if asked.quick else 1000)
    rounds = asked.rounds or (2 if asked.quick else 5)
    save_workload(WORKLOAD)
    found = {backend: compared(backend, n, rounds) for backend in ("asyncio", "trio")}
    figures: dict[str, Any] = {
        "cpu_ratio": found["asyncio"]["cpu_ratio"],
        "cpu_ratio_trio": found["trio"]["cpu_ratio"],
        "p99_ms_1000": found["asyncio"]["p99_ms"],
        "p50_ms_1000": found["asyncio"]["p50_ms"],
        **match_us(20 if asked.quick else 200),
        **errors(),
        "equal_tokens": all(each["equal_tokens"] for each in found.values()),
    }
    figures = {key: round(v, 3) if isinstance(v, float) else v for key, v in figures.items()}
    for key, value in figures.items():
        wanted = f"≤ {PROMISED[key]:g}" if key in PROMISED else ""
        short = key in PROMISED and value > PROMISED[key]
        say(f"{key:>20} {value!s:>10}  {wanted}{'  short of it' if short else ''}")
    figures["n"] = n
    figures["details"] = {backend: each["details"] for backend, each in found.items()}
    print(json.dumps(figures))
    return 0 if figures["equal_tokens"] else 1


if __name__ == "__main__":
    sys.exit(main())
