"""Fixtures that most tests share."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.bridge import WorkerThreads

# Engine children import `fake_core` from here, and find nothing to download anywhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Shells start background jobs with Ctrl-C ignored, which the processes of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Virtual time, repeatable schedules and a check for leaks, as users of the library have them.
pytest_plugins = ["rollout.testing.plugin"]


@pytest.fixture
def threads() -> Iterator[WorkerThreads]:
    """Where sync tools run."""
    from rollout.bridge import WorkerThreads

    pool = WorkerThreads(max_threads=4, max_abandoned=2)
    yield pool
    pool.close()
