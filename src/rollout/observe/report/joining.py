"""Which trajectory of the events is which row of the table."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.observe.report.rows import Row
    from rollout.observe.report.run_times import RunTimes
    from rollout.observe.report.trajectory_times import TrajectoryTimes


def joined(rows: Sequence[Row], times: RunTimes) -> list[TrajectoryTimes | None]:
    """The times of each row, in their order; None where events say nothing of it.

    Uids recur from step to step, and a validation of the same step may have them too. A row whose
    step is not known, or whose step has several of its name, is the one that ended as it did and
    took as long; the latest, where that does not tell them apart.
    """
    named: dict[tuple[str, int | None], list[TrajectoryTimes]] = defaultdict(list)
    for each in reversed(times.trajectories.values()):
        named[each.name, each.step].append(each)
        named[each.name, None].append(each)
    taken: set[int] = set()
    found = []
    for row in rows:
        same = [each for each in named[row.name, row.step] if id(each) not in taken]
        best = max(same, key=lambda each: _likeness(each, row), default=None)
        taken.add(id(best))
        found.append(best)
    return found


def names_of(rows: Sequence[Row]) -> list[str]:
    """What the page calls each row, no two the same: ``uid/member``, of several with their step."""
    often = Counter(row.name for row in rows)
    names = [row.name if often[row.name] == 1 else _with_step(row) for row in rows]
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique


def _with_step(row: Row) -> str:
    if row.step is None:
        return row.name
    return f"step {row.step}{' validation' if row.validate else ''}: {row.name}"


def _likeness(times: TrajectoryTimes, row: Row) -> tuple[bool, bool, float]:
    took = None if times.began is None or times.ended is None else times.ended - times.began
    apart = 0.0 if took is None or row.seconds is None else abs(took - row.seconds)
    is_of_kind = row.validate is None or times.validate == row.validate
    return is_of_kind, times.ending == (row.outcome, row.generated), -apart
