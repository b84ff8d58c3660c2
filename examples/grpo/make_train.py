"""All trainings that `make train` runs: two seeds on trio and asyncio, and TRL's, one by one.

python examples/grpo/make_train.py [--steps 45] [--out build/train] [--trl-python PYTHON]

The last line is JSON with the worst of all runs; each run's curves are in its directory. TRL's
trainer runs where `--trl-python` names an interpreter that has it (`make train` makes one).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path

RUN = Path(__file__).with_name("run.py")
RUN_TRL = Path(__file__).parents[1] / "trl_grpo" / "run.py"


def one(seed: int, backend: str, steps: int, out: Path) -> dict[str, float]:
    """A run in a process of its own; what it prints goes through."""
    options = ["--steps", str(steps), "--seed", str(seed), "--backend", backend, "--out", str(out)]
    print(f"seed {seed} on {backend}", flush=True)
    subprocess.run([sys.executable, str(RUN), *options], check=True)
    result: dict[str, float] = json.loads((out / "result.json").read_text())
    return result


def with_trl(python: str, out: Path) -> dict[str, float]:
    """The same task through TRL's trainer, in its own environment."""
    print("TRL", flush=True)
    subprocess.run([python, str(RUN_TRL), "--out", str(out)], check=True)
    result: dict[str, float] = json.loads((out / "result.json").read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--out", type=Path, default=Path("build/train"))
    parser.add_argument("--trl-python", help="an interpreter with TRL; without one it is left out")
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
    if asked.trl_python:
        worst |= with_trl(asked.trl_python, asked.out / "trl")
    print(json.dumps(worst))


if __name__ == "__main__":
    main()
