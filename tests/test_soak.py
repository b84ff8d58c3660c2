"""A small soak; `benchmarks/soak.py` runs as many as one likes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
SOAK = Path(__file__).parent.parent / "benchmarks" / "soak.py"


def test_soak_small_finds_no_anomaly_and_prints_its_figures_as_json() -> None:
    done = subprocess.run(
        [sys.executable, str(SOAK), "--trajectories", "96", "--round", "48"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["anomalies"] == 0
    assert figures["trajectories"] == 96
    assert set(figures) == {
        "trajectories",
        "anomalies",
        "rss_start_mb",
        "rss_end_mb",
        "rss_growth",
        "virtual_hours",
        "cpu_us_per_turn",
    }
