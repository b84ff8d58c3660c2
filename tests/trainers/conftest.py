"""Trainers that exist, from the registry, on our engines; `make test-trainers` runs this directory.

It runs once in each trainer's environment; tests of the others are skipped by the trainer's name.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "WANDB_MODE": "disabled",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # it is other people's code that warns
    warnings.simplefilter("ignore")  # what is collected after the last test


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Trainers keep threads and files as long as the process lives."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.rollout(allow_leaks=("threads", "files", "tasks")))
