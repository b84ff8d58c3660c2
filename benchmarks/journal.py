"""What a journal costs, and what it keeps when the driver is killed.

    python benchmarks/journal.py [--quick] [--n 1024] [--rounds 24] [--kills 50] [--only cost|kills]

Cost: rounds of `benchmarks/driver.py` on the instant engine, with a journal and without, in
processes of their own that take turns; CPU of the driver for each turn, all threads, through
`generate`. A process keeps what its memory looks like, which costs one side up to 3 % more than
the other: the rounds are spread over several pairs of them. Kills: the driver of a batch on real
embedded engines is killed (`kill -9`) at a random moment and resumed, until the batch is whole;
what had been finished in the journal at a kill must come back bit for bit without being run again.
The last line is JSON:

* ``cpu_ratio``: CPU a turn with the journal over that without, the median over its rounds, each
  beside the ones before and after it; ``half_interval``: what its 95 % interval extends to either
  side;
* ``kills``: how many times a driver was killed; ``finished``: trajectories that were finished then;
* ``lost``: of these those that a resumption ran again or did not return;
* ``repeated``: tool calls answered twice though their answer was in the journal;
* ``bit_equal``: whether ids, log-probs, masks, rewards and outcomes of all of them came back.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from driver_cases.alternation import alternate, median, ratios_between, say
from driver_cases.cases import Bench, Sizes
from driver_cases.workload import save_workload
from intervals import ratio_and_half
from journal_cases.kills import kill_again_and_again

#: Of one pair of processes.
ROUNDS = 4
WORKLOAD = Path(__file__).parents[1] / "build" / "driver" / "workload"


def cost(n: int, rounds: int, place: Path) -> dict[str, Any]:
    """`cpu_ratio`, and what it is made of."""
    found: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    ratios: list[float] = []
    pairs = max(1, rounds // ROUNDS)
    bench = Bench(directory=str(WORKLOAD), sizes=Sizes(rounds=-(-rounds // pairs)), has_verl=False)
    for number in range(pairs):
        os.environ["PYTHONHASHSEED"] = str(number)  # else they differ in more than the journal
        try:
            journal = str(place / f"journal-{number}")
            sides = {"off": bench.ours(n), "on": bench.ours(n, journal=journal)}
            acts = {name: partial(side.ask, scope="generate") for name, side in sides.items()}
            both = alternate(acts, bench.sizes.rounds)
        finally:
            bench.close()
            del os.environ["PYTHONHASHSEED"]
        ratios += ratios_between(both["on"], both["off"], "cpu_ms")
        for name, figures in both.items():
            found[name] += figures
    bench.check_tokens("cost", [each for side in found.values() for each in side])
    return {
        "cpu_ratio": round(statistics.median(ratios), 4),
        "half_interval": round(ratio_and_half(ratios)[1], 4),
        "cpu_us_off": round(1e3 * median(found["off"], "cpu_ms"), 1),
        "cpu_us_on": round(1e3 * median(found["on"], "cpu_ms"), 1),
        **bench.figures,
    }


def main() -> None:
    """Run what is asked for and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="4 rounds of 256, 5 kills")
    parser.add_argument("--n", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--only", choices=("cost", "kills"))
    asked = parser.parse_args()
    if asked.quick:
        asked.n, asked.rounds, asked.kills = 256, 4, 5
    figures: dict[str, Any] = {}
    place = Path(tempfile.mkdtemp(prefix="rollout-journal-"))
    try:
        if asked.only != "kills":
            save_workload(WORKLOAD)
            figures |= cost(asked.n, asked.rounds, place)
        if asked.only != "cost":
            figures |= kill_again_and_again(place, asked.kills, asked.seed)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    say(json.dumps(figures, indent=2))
    print(json.dumps(figures))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
