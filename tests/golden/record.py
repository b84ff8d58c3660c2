"""Write the golden runs, or compare them: ``python tests/golden/record.py [--check] [KIND …]``."""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parent))

from golden.differences import first_difference  # noqa: E402
from golden.runs import KINDS, play  # noqa: E402

Run = dict[str, Any]


def path_of(kind: str) -> Path:
    """Where the runs of a kind are."""
    return FOLDER / f"{kind}.json.gz"


def read_runs(kind: str) -> dict[str, Run]:
    """Recorded runs by name."""
    runs: dict[str, Run] = json.loads(gzip.decompress(path_of(kind).read_bytes()))
    return runs


def write_runs(kind: str, runs: dict[str, Run]) -> None:
    """The same runs give the same bytes."""
    text = json.dumps(runs, ensure_ascii=False, indent=0, sort_keys=True)
    path_of(kind).write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def names_of(kind: str) -> list[str]:
    """The runs of a kind."""
    return [f"{kind}-{seed}" for seed in range(KINDS[kind].seeds)]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=[*KINDS], metavar="KIND")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--backend", choices=("trio", "asyncio"), default="trio")
    parser.add_argument("--schedule-seed", type=int, default=0, help="of trio's order of tasks")
    options = parser.parse_args()
    logging.disable()  # what fails is meant to
    faults = 0
    for kind in options.kinds:
        played = {
            name: play(name, options.backend, options.schedule_seed) for name in names_of(kind)
        }
        if not options.check:
            write_runs(kind, played)
            continue
        recorded = read_runs(kind)
        for name in recorded.keys() | played.keys():
            difference = first_difference(name, recorded.get(name), played.get(name))
            if difference:
                faults += 1
                print(difference)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
