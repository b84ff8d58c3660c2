"""The environment in which verl runs: `.venv-verl`, which the Makefile makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-verl"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".ready"


def is_ready() -> bool:
    """Whether it has been made."""
    return STAMP.exists()


def set_up() -> None:
    """Make it unless it is there as it should be; blocks for minutes and says so.

    Raises:
        SystemExit: What is wanted cannot be installed.
    """
    if not is_ready():
        _say(f"installing verl into {VENV}: 2 GB, some minutes, once")
    command = ["make", "--directory", str(ROOT), f"{VENV.name}/{STAMP.name}"]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(
            f"benchmarks/driver.py: {' '.join(command)} ended with {done.returncode}; "
            "`--without-verl` measures our side alone"
        )


def _say(text: str) -> None:
    print(f"benchmarks/driver.py: {text}", file=sys.stderr, flush=True)
