"""Loggers and trackers that exist, from the registry, offline; `make test-loggers` runs this."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
_HOME = tempfile.mkdtemp(prefix="rollout-loggers-")
os.environ |= {
    "HOME": _HOME,
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WEAVE_PRINT_CALL_LINK": "false",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # it is other people's code that warns
    warnings.simplefilter("ignore")
