"""Kills drivers at random moments, resumes them, and compares what comes back."""

from __future__ import annotations

import os
import random  # noqa: TID251  (the moments)
import signal
import subprocess
import sys
import time  # noqa: TID251  (the moments)
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driver_cases.alternation import say

from journal_cases.driver_to_kill import GROUPS, MEMBERS
from rollout import load_trajectories
from rollout.batch import RolloutBatch
from rollout.errors import RolloutError
from rollout.journal.log_file import read_frames
from rollout.journal.records import EndRecord, ResultsRecord, decode_record

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory
    from rollout.journal.records import Record

HERE = Path(__file__).parents[1]
#: Longest that a driver may take to finish by itself.
PATIENCE_S = 300.0


class Figures:
    """What was found so far."""

    def __init__(self) -> None:
        self.kills = self.finished = self.lost = self.repeated = self.batches = 0
        self.bit_equal = True

    def as_dict(self) -> dict[str, Any]:
        """For the last line."""
        return dict(vars(self))


def kill_again_and_again(place: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill until there were so many; batch after batch."""
    figures, moments = Figures(), random.Random(seed)
    while figures.kills < kills:
        directory = place / f"batch-{figures.batches}"
        directory.mkdir()
        _run_batch(directory, figures, moments, kills)
        figures.batches += 1
    return figures.as_dict()


def _run_batch(directory: Path, figures: Figures, moments: random.Random, kills: int) -> None:
    """One batch, killed a few times before it may end; then everything is compared."""
    known: dict[tuple[str, int], dict[str, Any]] = {}
    may_repeat: Counter[str] = Counter()
    for _ in range(moments.randint(2, 5)):
        if figures.kills == kills or not _killed(directory, moments):
            break
        figures.kills += 1
        for trajectory in _finished(directory):
            place = (trajectory.uid, trajectory.member)
            content = content_of(trajectory)
            figures.bit_equal &= known.setdefault(place, content) == content
        for name in _calls(directory) - _answered(directory):
            may_repeat[name] += 1  # it was under way: its answer was not in the journal
        say(f"{directory.name}: killed, {len(known)} of {GROUPS * MEMBERS} finished")
    figures.finished += len(known)
    subprocess.run(
        _command(directory), cwd=HERE, check=True, timeout=PATIENCE_S, env=_environment()
    )
    batch = RolloutBatch.load(directory / "batch")
    returned = {(each.uid, each.member): content_of(each) for each in batch.trajectories}
    for place, content in known.items():
        if place not in returned:
            figures.lost += 1
        elif returned[place] != content:
            figures.bit_equal = False
    figures.lost += len(known) - _ended_once(directory / "journal", known)
    calls = Counter((directory / "calls").read_text().splitlines())
    figures.repeated += sum(max(0, count - 1 - may_repeat[name]) for name, count in calls.items())


def _ended_once(journal: Path, known: dict[tuple[str, int], Any]) -> int:
    """How many of the known ones were not finished a second time, by a run after the kill."""
    ends: Counter[tuple[str, int]] = Counter()
    for record in _records(journal):
        if isinstance(record, EndRecord):
            ends.update((key.uid, key.member) for key, _ in record.ends)
    return sum(ends[place] == 1 for place in known)


def _records(journal: Path) -> list[Record]:
    """The records of a journal."""
    return [decode_record(payload) for _, payload in read_frames(journal) if payload is not None]


def _killed(directory: Path, moments: random.Random) -> bool:
    """Whether a driver was killed at a random moment of its work; false where it ended first."""
    journal = directory / "journal"
    before = journal.stat().st_size if journal.exists() else 0
    process = subprocess.Popen(_command(directory), cwd=HERE, env=_environment())
    begun, pause_s = None, moments.uniform(0.0, 4.0)
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        size = journal.stat().st_size if journal.exists() else 0
        if begun is None and size > before:
            begun = time.monotonic()
        if begun is not None and time.monotonic() - begun >= pause_s:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.002)
    if process.poll() is None:
        process.kill()
        raise SystemExit(f"{directory.name}: the driver did not end within {PATIENCE_S:g} s")
    if process.returncode:
        raise SystemExit(f"{directory.name}: the driver failed with {process.returncode}")
    return False


def _finished(directory: Path) -> list[Trajectory]:
    try:
        return load_trajectories(directory / "journal")
    except RolloutError:
        return []


def _calls(directory: Path) -> set[str]:
    path = directory / "calls"
    return set(path.read_text().splitlines()) if path.exists() else set()


def _answered(directory: Path) -> set[str]:
    """Calls whose answers the journal has."""
    results = [r for r in _records(directory / "journal") if isinstance(r, ResultsRecord)]
    return {f"{each.segment}/{each.turn - 1}" for each in results}


def content_of(trajectory: Trajectory) -> dict[str, Any]:
    """What must come back bit for bit."""
    transcript = trajectory.transcript
    return {
        "ids": transcript.ids_bytes(),
        "log_probs": transcript.log_probs().tobytes(),
        "mask": transcript.mask().tobytes(),
        "versions": transcript.weight_versions().tobytes(),
        "reward": trajectory.reward,
        "outcome": (trajectory.outcome, trajectory.reason),
        "metrics": trajectory.metrics,
        "messages": list(trajectory.messages),
    }


def _command(directory: Path) -> list[str]:
    return [sys.executable, "-m", "journal_cases.driver_to_kill", str(directory)]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
