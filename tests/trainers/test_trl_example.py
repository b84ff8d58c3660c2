"""`examples/trl_grpo`: a training through the adapter, on the embedded engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed here: .venv-trl has it")

RUN = Path(__file__).parents[2] / "examples" / "trl_grpo" / "run.py"


def run_example(out: Path, *options: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(RUN), "--out", str(out), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((out / "result.json").read_text())
    return result


def test_trl_example_samples_what_the_trainer_would(tmp_path: Path) -> None:
    result = run_example(tmp_path, "--steps", "3")
    assert result["trl_ratio_mean"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_trl_example_learns_which_key_opens_which_door(tmp_path: Path) -> None:
    result = run_example(tmp_path)
    assert result["trl_reward_last"] >= 0.85
    assert result["trl_ratio_mean"] == pytest.approx(1.0, abs=1e-3)
