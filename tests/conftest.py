"""Fixtures that most tests share."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


#: Files whose tests start a Ray cluster, or measure time: beside themselves, or each other, they
#: would be slow or wrong.
ALONE = {
    "test_ray_placement.py": "ray",
    "test_engine_pairs.py": "ray",
    "test_loop_lag.py": "timing",
}


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Tests that share a fixture of their file, or what `ALONE` says, run in one process."""
    for item in items:
        defs = getattr(item, "_fixtureinfo", None)
        scopes = {each[-1].scope for each in defs.name2fixturedefs.values()} if defs else set()
        group = ALONE.get(item.path.name)
        if group is None and scopes & {"module", "class"}:
            group = item.path.name
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(name=group))
