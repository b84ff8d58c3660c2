"""A small soak; `benchmarks/soak.py` runs as many as one likes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from forked import python_script

pytestmark = pytest.mark.process
SOAK = Path(__file__).parent.parent / "benchmarks" / "soak.py"


def test_soak_small_finds_no_anomaly_and_prints_its_figures_as_json() -> None:
    with python_script(
        SOAK, "--trajectories", "32", "--round", "16", stdout=subprocess.PIPE
    ) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    figures = json.loads(output.splitlines()[-1])
    assert figures["anomalies"] == 0
    assert figures["trajectories"] == 32
    assert set(figures) == {
        "trajectories",
        "anomalies",
        "rss_start_mb",
        "rss_end_mb",
        "rss_growth",
        "virtual_hours",
        "cpu_us_per_turn",
    }
