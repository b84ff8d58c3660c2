"""All trainings that `make train` runs: two seeds on trio and asyncio, one after another.

python examples/grpo/make_train.py [--steps 45] [--out build/train]

The last line is JSON with the worst of all runs; each run's curves are in its directory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path

RUN = Path(__file__).with_name("run.py")


def one(seed: int, backend: str, steps: int, out: Path) -> dict[str, float]:
    """A run in a process of its own; what it prints goes through."""
    options = ["--steps", str(steps), "--seed", str(seed), "--backend", backend, "--out", str(out)]
    print(f"seed {seed} on {backend}", flush=True)
    subprocess.run([sys.executable, str(RUN), *options], check=True)
    result: dict[str, float] = json.loads((out / "result.json").read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--out", type=Path, default=Path("build/train"))
    asked = parser.parse_args()
    runs = [
        one(seed, backend, asked.steps, asked.out / f"{backend}-{seed}")
        for seed, backend in product((0, 1), ("trio", "asyncio"))
    ]
    worst = {
        "first_tenth": max(run["first_tenth"] for run in runs),
        "last_tenth": min(run["last_tenth"] for run in runs),
        "steps": asked.steps,
        "cpu_s": max(run["cpu_s"] for run in runs),
        "ratio_max_error": max(run["ratio_max_error"] for run in runs),
    }
    print(json.dumps(worst))


if __name__ == "__main__":
    main()
