"""Hostile programs, run as processes of their own: each ends by itself, and harms nobody else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
ATTACKS = Path(__file__).parent / "attacks"


def run_attack(name: str, *args: str, timeout_s: float = 300) -> str:
    """What the program prints; it must end well within the time."""
    done = subprocess.run(
        [sys.executable, str(ATTACKS / name), *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_hostile_code_harms_its_own_trajectories_only(backend: str) -> None:
    lines = run_attack("hostile_code.py", backend).splitlines()
    seconds = {line.split()[0]: float(line.split()[1]) for line in lines if len(line.split()) == 2}
    assert [line for line in lines if len(line.split()) > 2] == [
        "assigns failed agent None 25",
        "calm completed - 1.0 25",
        "closing failed unresponsive None 25",
        "hold completed - 1.0 25",
        "panic failed reward None 25",
        "panics failed agent None 25",
        "reward failed unresponsive None 25",
        "stays failed unresponsive None 25",
    ]
    assert seconds["unresponsive"] == 100
    # Bounds on what would otherwise never end, with room for a busy machine.
    assert seconds["generate"] < 40
    assert seconds["cancelled"] < 15
    assert seconds["closed"] < 10


@pytest.mark.slow
def test_full_disk_costs_nothing_that_was_said_to_be_kept(tmp_path: Path) -> None:
    lines = run_attack("full_disk.py", str(tmp_path), timeout_s=600).splitlines()
    assert len(lines) == 15
    assert [line for line in lines if not line.endswith(" whole")] == []
    codes = {(int(size), end): int(code) for size, end, code, _ in map(str.split, lines)}
    assert [codes[size, "left"] for size in (16, 120, 400, 2000, 40_000)] == [4, 4, 4, 4, 0]
    assert {code for (_, end), code in codes.items() if end == "SIGINT"} <= {0, 4, 130, -2}
    assert {code for (_, end), code in codes.items() if end == "SIGKILL"} <= {0, 4, -9}
