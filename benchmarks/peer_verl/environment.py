"""The environment in which verl runs: `.venv-verl`, made when it is first wanted."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-verl"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
#: Installed first and by itself: what comes later must not choose another one.
TORCH = "torch==2.13.0"
STAMP = VENV / ".ready"


def is_ready() -> bool:
    """Whether it was made of the requirements as they are now."""
    return STAMP.exists() and STAMP.read_text() == _wanted()


def set_up() -> None:
    """Make it unless it is there; blocks for minutes and says so.

    Raises:
        SystemExit: pip cannot install what is wanted.
    """
    if is_ready():
        return
    _say(f"installing verl and {TORCH} into {VENV}: 2 GB, some minutes, once")
    STAMP.unlink(missing_ok=True)
    if not PYTHON.exists():
        # The requirements are those of this version.
        python = shutil.which("python3.11") or sys.executable
        _run([python, "-m", "venv", str(VENV)])
    _run([str(PYTHON), "-m", "pip", "install", "--quiet", TORCH])
    _run([str(PYTHON), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)])
    STAMP.write_text(_wanted())


def _wanted() -> str:
    return hashlib.sha256(TORCH.encode() + REQUIREMENTS.read_bytes()).hexdigest()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(
            f"benchmarks/driver.py: {' '.join(command)} ended with {done.returncode}; "
            "`--without-verl` measures our side alone"
        )


def _say(text: str) -> None:
    print(f"benchmarks/driver.py: {text}", file=sys.stderr, flush=True)
