"""Reads the directory of a run, and writes its report."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.clocks import wall
from rollout.errors import RolloutError
from rollout.observe.event_file import EVENTS, read_events
from rollout.observe.report.facts import run_facts, summary_of
from rollout.observe.report.finding import Finding, Run
from rollout.observe.report.findings import findings_of, looked_for
from rollout.observe.report.joining import names_of
from rollout.observe.report.packing import packed, packed_trajectory
from rollout.observe.report.page import page_pieces
from rollout.observe.report.rows import Row, columns_of, row_of
from rollout.observe.report.run_times import RunTimes, times_of
from rollout.observe.report.saved_trajectories import SavedTrajectory, TrajectoryLines
from rollout.observe.report.series import series_of
from rollout.observe.report.token_texts import TokenTexts
from rollout.observe.report.trajectory_times import DIGITS, OTHER, SPENT, TOOL, TrajectoryTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Files of a run's directory; `rollout.batch` writes them. The last one says that it is whole.
TRAJECTORIES, META = "trajectories.jsonl", "meta.json"
#: What `rollout run` has of it before that.
JOURNAL = "trajectories.journal"
#: The report's, within the directory, where no other place is named.
REPORT = "report.html"


class RunReport:
    """The report of one directory; each `write` takes in what has come since.

    Args:
        directory: Of a run, as ``rollout run --out`` or `RolloutBatch.save` writes it.
        decode: Ids to text, of the run's tokenizer; None shows ids, and the texts of whole spans
            where the run has saved them.

    Attributes:
        findings: What stood out when it was last written, the worst first.
        is_growing: Whether the run had not come to its end then; or it was cut short.

    Raises:
        RolloutError: There is no run in it.
    """

    def __init__(
        self, directory: Path | str, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        self.directory = Path(directory)
        if not os.path.isdir(self.directory):
            raise RolloutError(f"{self.directory}: expected the directory of a run")
        named = (TRAJECTORIES, JOURNAL, EVENTS)
        if not any(os.path.exists(self.directory / name) for name in named):
            raise RolloutError(
                f"{self.directory}: expected {TRAJECTORIES} or {EVENTS} in it, which `rollout run "
                f"--out` and `RolloutBatch.save` write"
            )
        self.findings: tuple[Finding, ...] = ()
        self.is_growing = True
        self._decode = decode
        self._lines = TrajectoryLines(self.directory / TRAJECTORIES)
        self._forget()

    def _forget(self) -> None:
        self._texts = TokenTexts(self._decode)
        self._rows: list[Row] = []
        self._sums: dict[str, float] = {}
        self._packs: list[str] = []

    def write(self, path: Path | str | None = None) -> Path:
        """Write the page, in place of the one that is there; returns its path.

        Raises:
            RolloutError: A file of the run cannot be read, or the page not be written.
        """
        path = self.directory / REPORT if path is None else Path(path)
        saved_at = self._saved_at()  # before its lines are read, which may be the last ones
        times = self._times()
        self._read(self._journal(times))
        self.is_growing = _is_growing(times, saved_at)
        self.findings = tuple(findings_of(Run(self._rows, times, self._sums)))
        _replace(path, page_pieces(self._title(), *self._parts(times)))
        return path

    def _saved_at(self) -> float | None:
        """When the run was saved as a whole, in seconds since 1970; None: not so far."""
        try:
            return (self.directory / META).stat().st_mtime
        except FileNotFoundError:
            return None

    def _title(self) -> str:
        return self.directory.resolve().name

    def _journal(self, times: RunTimes) -> Path:
        """Of the run: in its directory, or where its configuration has it."""
        own = self.directory / JOURNAL
        section = None if times.run is None else times.run.config.get("journal")
        named = section.get("path") if isinstance(section, dict) else None
        return own if own.exists() or not isinstance(named, str) else Path(named).expanduser()

    def _read(self, journal: Path) -> None:
        lines = self._lines.read(journal)
        if self._lines.has_restarted:
            self._forget()
        for line in lines:
            self._lines.decode(line, self._add)

    def _add(self, trajectory: SavedTrajectory) -> None:
        self._packs.append(packed_trajectory(trajectory, self._texts))
        self._rows.append(row_of(trajectory))
        for name, value in trajectory.metrics.items():
            if name.startswith("tool/"):
                self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def _times(self) -> RunTimes:
        there = (self.directory / EVENTS).exists()
        return times_of(read_events(self.directory)) if there else RunTimes()

    def _parts(self, times: RunTimes) -> tuple[dict[str, Any], Iterator[tuple[str, str]]]:
        run = Run(self._rows, times, self._sums)
        known = [
            each or TrajectoryTimes(row.name)
            for row, each in zip(self._rows, run.joined, strict=True)
        ]
        columns = columns_of(self._rows)
        columns["tools"] = list(map(_tools, self._rows, known))
        columns["name"] = names_of(self._rows)
        report = {
            "title": self._title(),
            "directory": str(self.directory.resolve()),
            "made_at": datetime.fromtimestamp(wall()).strftime("%Y-%m-%d %H:%M:%S"),
            "is_growing": self.is_growing,
            "summary": summary_of(run),
            "findings": self.findings,
            "looked_for": looked_for(run),
            "spent": _spent(times),
            "series": series_of(times),
            "tools": run.tools,
            "replicas": run.replicas,
            "rows": {**columns, "replicas": [each.replicas for each in known]},
            "run": run_facts(run),
            "notes": self._notes(run),
            "config": None if times.run is None else times.run.config or None,
        }
        return report, self._blocks(run)

    def _blocks(self, run: Run) -> Iterator[tuple[str, str]]:
        if self._texts.are_known:
            yield "texts", packed(self._texts.table())
        for at, pack in enumerate(self._packs):
            yield f"t{at}", pack
            known = run.joined[at]
            if known is not None and known.intervals:
                yield f"w{at}", packed(_listed(known, run.times.start or 0.0))

    def _notes(self, run: Run) -> list[str]:
        times, notes = run.times, []
        if not self._texts.are_known:
            notes.append(
                "The tokenizer of the run was not at hand: tokens are shown as ids, beside the "
                "texts that the run has saved. --tokenizer MODEL names one."
            )
        if not times.is_known:
            notes.append(
                f"There is no {EVENTS}: waterfalls, times of tools, replicas and plots over time "
                "are made of it. `rollout run --out` records one."
            )
        if times.endings and not run.rows:
            notes.append(
                f"Trajectories were not saved: there is no {TRAJECTORIES} and no journal, and "
                f"{EVENTS} alone says how they ended. `rollout run --out` and `RolloutBatch.save` "
                "write them."
            )
        if times.dropped:
            notes.append(
                f"{times.dropped:,} events are missing in {EVENTS}: the disk was too slow."
            )
        if len(run.batches) < len(times.batches):
            notes.append(
                f"Trajectories are of {len(run.batches):,} of {len(times.batches):,} calls of the "
                "run; what is said of tools, replicas and times is of all of them."
            )
        if self.is_growing:
            notes.append("The run has not ended, or was cut short: this is what there was so far.")
        return notes


def _is_growing(times: RunTimes, saved_at: float | None) -> bool:
    """Without events, a run is over once it is saved; a later one may append its events."""
    if times.run is None:
        return saved_at is None
    return not times.has_ended and (saved_at is None or saved_at < times.run.wall_s)


def write_report(
    directory: Path | str,
    path: Path | str | None = None,
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Path:
    """Write the report of a run as one HTML page; returns its path.

    Args:
        directory: Of a run, as ``rollout run --out`` or `RolloutBatch.save` writes it.
        path: Of the page; None: ``report.html`` in the directory.
        decode: Ids to text, such as `runtime.template.decode`; without it ids are shown.

    Raises:
        RolloutError: There is no run in the directory, a file of it cannot be read, or the page
            not be written.
    """
    return RunReport(directory, decode).write(path)


def _tools(row: Row, times: TrajectoryTimes) -> list[str]:
    """Those of all its conversations, and calls that could not be parsed, where events tell."""
    called = [each.label for each in times.intervals if each.phase == TOOL]
    return list(dict.fromkeys([*row.tools, *called]))


def _listed(times: TrajectoryTimes, start: float) -> list[list[Any]]:
    ordered = sorted(times.intervals, key=lambda each: each.start)
    return [
        [
            each.phase,
            round(each.start - start, DIGITS),
            round(each.end - start, DIGITS),
            each.label,
            each.turn,
            each.note,
            each.path,
        ]
        for each in ordered
    ]


def _spent(times: RunTimes) -> list[tuple[str, float]]:
    """Seconds of all trajectories by phase, in the order of the phases."""
    total: Counter[str] = Counter()
    for each in times.trajectories.values():
        total.update(each.spent(times.end))
    return [(phase, round(total[phase], DIGITS)) for phase in (*SPENT, OTHER) if total[phase] > 0]


def _replace(path: Path, pieces: Iterator[str]) -> None:
    """Write a file as a whole or not at all."""
    try:
        number, aside = tempfile.mkstemp(prefix=".report-", suffix=".html", dir=path.parent)
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.writelines(pieces)
            os.chmod(aside, 0o666 & ~_umask())
            os.replace(aside, path)
        except BaseException:
            os.unlink(aside)
            raise
    except OSError as error:
        raise RolloutError(f"{path}: cannot be written: {error.strerror}") from error


def _umask() -> int:
    """That of this process, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
