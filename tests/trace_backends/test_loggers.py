"""The example of trainers' loggers, each with its real package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "loggers" / "run.py"


@pytest.mark.parametrize("logger", ["tensorboard", "mlflow", "wandb"])
def test_loggers_example_writes_the_metrics_of_each_step(logger: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(logger) is None:
        pytest.skip(f"{logger} is not installed")
    said = subprocess.run(
        [sys.executable, str(EXAMPLE), logger],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert f"{logger}: 3 steps" in said.stdout
    written = list((tmp_path / "build" / "loggers").rglob("*"))
    if logger == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(tmp_path / "build" / "loggers" / "tensorboard"))
        read.Reload()
        rewards = read.Scalars("rollout/reward/mean")
        assert [(each.step, each.value) for each in rewards] == [(0, 1.0), (1, 1.0), (2, 1.0)]
    elif logger == "mlflow":
        (found,) = [path for path in written if path.match("metrics/reward/mean")]
        assert len(found.read_text().splitlines()) == 3
    else:
        assert [path.suffix for path in written].count(".wandb") == 1
