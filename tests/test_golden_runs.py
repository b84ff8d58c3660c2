"""The golden runs are what they were when they were recorded: see ``tests/golden/README.md``."""

from __future__ import annotations

from functools import cache

import pytest

from golden.differences import first_difference
from golden.record import names_of, read_runs
from golden.runs import KINDS, play
from slow_cases import slow_but

recorded_runs = cache(read_runs)
NAMES = [name for kind in KINDS for name in names_of(kind)]
#: In `make test`: with those on asyncio, they take every branch that the hundred take.
FAST = """
tools-0 tools-2 tools-6 lengths-0 lengths-1 lengths-2 lengths-3 lengths-4 lengths-5 turn_limits-2
turn_limits-3 turn_limits-4 segments-5 compaction-0 compaction-1 sampling-1 sampling-3 users-1
rewards-0 rewards-1 rewards-2 rewards-3 failures-1 groups-5 groups-6 groups-7 carried-0 carried-7
streamed_groups-1 deadlines-1 deadlines-4 deadlines-5 deadlines-6 deadlines-7 cancelled-1
streamed-0 weights-0 lost_replicas-0 lost_replicas-1
"""


def assert_replays(name: str, backend: str, schedule_seed: int = 0) -> None:
    recorded = recorded_runs(name.rpartition("-")[0]).get(name)
    difference = first_difference(name, recorded, play(name, backend, schedule_seed))
    if difference:
        pytest.fail(f"{difference}\nwhere that is meant: python tests/golden/record.py", False)


def test_golden_runs_are_a_hundred() -> None:
    assert sum(len(recorded_runs(kind)) for kind in KINDS) == len(NAMES) == 100


@pytest.mark.parametrize("name", slow_but(NAMES, *FAST.split()))
def test_golden_run_replays_on_trio(name: str) -> None:
    # Any order of tasks gives the same.
    assert_replays(name, "trio", schedule_seed=sum(map(ord, name)))


@pytest.mark.parametrize("name", slow_but(NAMES, *(next(iter(names_of(kind))) for kind in KINDS)))
def test_golden_run_replays_on_asyncio(name: str) -> None:
    assert_replays(name, "asyncio")
