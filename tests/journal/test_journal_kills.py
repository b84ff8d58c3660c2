"""Drivers killed in the middle of carried groups, and of programs that speak HTTP."""

from __future__ import annotations

import json
import os
import random  # noqa: TID251  (the moments)
import signal
import subprocess
import sys
import time  # noqa: TID251  (other processes)
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from journal_material import records_in
from killed_driver import CONVERSATIONS, GROUPS, MEMBERS, QUESTIONS, STEPS, content_of
from rollout import load_trajectories
from rollout.journal.records import EndRecord, ResultsRecord, TurnRecord

HERE = Path(__file__).parents[1]
PATIENCE_S = 120.0

pytestmark = [pytest.mark.slow, pytest.mark.process]


def seen(directory: Path) -> list[dict[str, Any]]:
    """What drivers have said so far."""
    path = directory / "seen"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def driver(mode: str, directory: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / "killed_driver.py"), mode, str(directory)]
    return subprocess.Popen(command, cwd=HERE, env={**os.environ, "OMP_NUM_THREADS": "1"})


def killed_after(mode: str, directory: Path, lines: int) -> bool:
    """Whether a driver was killed once so much was seen; false where it ended first."""
    process, deadline = driver(mode, directory), time.monotonic() + PATIENCE_S
    while process.poll() is None:
        if len(seen(directory)) >= lines:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return True
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert process.returncode == 0
    return False


def finished(directory: Path) -> dict[Any, Any]:
    """What the journal has whole."""
    rows = [content_of(each) for each in load_trajectories(directory / "journal")]
    return {(row[0], row[1]): json.loads(json.dumps(row)) for row in rows}


def entries(directory: Path) -> list[Any]:
    return records_in(directory / "journal")


def test_collect_killed_among_carried_groups_loses_and_repeats_nothing(tmp_path: Path) -> None:
    moments, known = random.Random(7), dict[Any, Any]()
    may_repeat: Counter[str] = Counter()
    kills = 0
    while killed_after("groups", tmp_path, len(seen(tmp_path)) + moments.randint(10, 60)):
        kills += 1
        for place, content in finished(tmp_path).items():
            assert known.setdefault(place, content) == content
        answered = {
            f"{each.segment}/{each.turn - 1}"
            for each in entries(tmp_path)
            if isinstance(each, ResultsRecord)
        }
        calls = {each["call"] for each in seen(tmp_path) if "call" in each}
        may_repeat.update(calls - answered)
    assert kills >= 3
    said = seen(tmp_path)
    assert any(each["carried"] for each in said if "carried" in each)
    steps: dict[int, Any] = {}
    for each in said:
        if "step" in each:  # a step that was given before is given again as it was
            assert steps.setdefault(each["step"], each["rows"]) == each["rows"]
    assert sorted(steps) == list(range(STEPS))
    uids = Counter(row[0] for rows in steps.values() for row in rows)
    assert set(uids.values()) == {MEMBERS}
    assert len(uids) == STEPS * GROUPS
    returned = {(row[0], row[1]): row for rows in steps.values() for row in rows}
    now = finished(tmp_path)
    for place, content in known.items():
        assert now[place] == content
        assert returned.get(place, content) == content
    records = [each for each in entries(tmp_path) if isinstance(each, EndRecord)]
    ends = Counter((key.uid, key.member) for each in records for key, _ in each.ends)
    assert all(ends[place] == 1 for place in known)
    calls_made = Counter(each["call"] for each in said if "call" in each)
    assert not {n: c for n, c in calls_made.items() if c - 1 > may_repeat[n]}


def answers_in(said: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """What each conversation was told, but for the time of day."""
    told = [each for each in said if "answer" in each]
    return {
        (each["conversation"], each["number"]): {**each["answer"], "created": 0} for each in told
    }


def test_function_agent_killed_in_mid_run_gets_the_answers_that_it_had(tmp_path: Path) -> None:
    had: dict[tuple[str, int], dict[str, Any]] = {}
    for lines in (3, 3 + CONVERSATIONS * 2):
        before = len(seen(tmp_path))
        assert killed_after("gateway", tmp_path, before + lines)
        told = answers_in(seen(tmp_path)[before:])
        assert {place: told[place] for place in had.keys() & told.keys()} == {
            place: had[place] for place in had.keys() & told.keys()
        }
        had |= told
        turns = Counter(each.key.uid for each in entries(tmp_path) if isinstance(each, TurnRecord))
        assert all(number < turns[uid] for uid, number in had)  # told once it is written
    before = len(seen(tmp_path))
    assert not killed_after("gateway", tmp_path, 1 << 30)
    again = answers_in(seen(tmp_path)[before:])
    assert len(again) == CONVERSATIONS * QUESTIONS
    assert {place: again[place] for place in had} == had
    assert {row[2] for row in seen(tmp_path)[-1]["rows"]} == {"completed"}
    turns = Counter(each.key.uid for each in entries(tmp_path) if isinstance(each, TurnRecord))
    assert set(turns.values()) == {QUESTIONS}
