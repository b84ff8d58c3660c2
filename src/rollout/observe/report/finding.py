"""A finding, and what findings are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import attrs
import msgspec

from rollout.observe.report.joining import joined
from rollout.observe.report.rows import Row
from rollout.observe.report.run_times import RunTimes
from rollout.observe.report.series import (
    ReplicaFigures,
    ToolFigures,
    replica_figures,
    tool_figures,
)
from rollout.observe.report.trajectory_times import TOOL, covered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollout.observe.events import TrajectoryEnded
    from rollout.observe.report.trajectory_times import TrajectoryTimes

Severity = Literal["severe", "notable"]
SEVERE: Severity = "severe"
NOTABLE: Severity = "notable"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that stands out.

    Attributes:
        kind: Its name for programs.
        title: What it is, with the number that shows it.
        text: More, in sentences.
        filter: A query of the table that shows the trajectories concerned; "" where none does.
    """

    kind: str
    severity: Severity
    title: str
    text: str
    filter: str = ""


class Ending(NamedTuple):
    """What events tell of a trajectory that was not saved, as a `Row` has it."""

    group_key: tuple[Any, ...]
    outcome: str
    reason: str
    limit: str
    cause: str
    reward: float | None
    generated: int
    calls: int
    errors: int
    resumes: int
    drift: str

    @classmethod
    def of(cls, event: TrajectoryEnded) -> Ending:
        """That of one event."""
        return cls(
            group_key=(event.step, event.validate, event.batch, event.group, event.uid),
            outcome=event.outcome,
            reason=event.reason,
            limit=event.limit_source,
            cause=event.cause,
            reward=event.reward,
            generated=event.generated_tokens,
            calls=event.tool_calls,
            errors=event.tool_errors,
            resumes=event.resumes,
            drift=event.drift,
        )


@attrs.frozen
class Run:
    """A run as findings see it.

    Attributes:
        sums: What the trajectories of its rows say of their calls, ``tool/TOOL/…``, summed up.
    """

    rows: Sequence[Row]
    times: RunTimes
    sums: Mapping[str, float] = attrs.field(factory=dict)

    @cached_property
    def endings(self) -> Sequence[Row | Ending]:
        """How trajectories ended: those that were saved, else those that events tell of."""
        return self.rows or [Ending.of(each) for each in self.times.endings]

    @cached_property
    def joined(self) -> list[TrajectoryTimes | None]:
        """The times of each row, in their order."""
        return joined(self.rows, self.times)

    @cached_property
    def batches(self) -> set[int]:
        """Calls of which there are rows; all of them, where there is none."""
        found = {each.batch for each in self.joined if each is not None and each.batch is not None}
        return found or set(self.times.calls.began)

    @cached_property
    def duration(self) -> float:
        """Seconds in which the calls of these rows were open."""
        return self.times.calls.seconds(self.batches)

    @cached_property
    def tools(self) -> list[ToolFigures]:
        """As `tool_figures`.

        Trajectories say how often they called what, as they do to a batch; events, where some of
        those that have ended are not among the rows.
        """
        are_all = len(self.rows) >= len(self.times.endings)
        calls = sum(value for name, value in self.sums.items() if name.endswith("/calls"))
        is_whole = are_all and calls == sum(row.calls for row in self.rows)
        return tool_figures(self.times, self.sums if is_whole else {})

    @cached_property
    def replicas(self) -> list[ReplicaFigures]:
        """As `replica_figures`."""
        return replica_figures(self.times)

    def slowest(self, share: float) -> list[TrajectoryTimes]:
        """Those that took longest, at least one."""
        known = [each for each in self.times.trajectories.values() if each.began is not None]
        known.sort(key=self._length, reverse=True)
        return known[: max(1, round(share * len(known)))]

    def _length(self, times: TrajectoryTimes) -> float:
        end = self.times.end if times.ended is None else times.ended
        return end - (times.began or 0.0)

    def tool_seconds(self, name: str, trajectories: Iterable[TrajectoryTimes]) -> float:
        """Seconds that these waited for a tool; calls at once count once."""
        return sum(
            covered(
                (part.start, part.end)
                for part in each.intervals
                if part.phase == TOOL and part.label == name
            )
            for each in trajectories
        )

    def tool_errors(self, tool: str) -> Counter[str]:
        """What it said when it failed, and how often."""
        known = [each.name for each in self.tools]
        calls = self.times.calls_of(tool, known)
        return Counter(call.error for call in calls if call.is_error)


def listed(causes: Counter[str]) -> str:
    """Each cause in a line of its own with its count, the most frequent first; all of them."""
    return "".join(
        f"\n{number:,} × {' '.join(cause.split()) or 'not known'}"
        for cause, number in causes.most_common()
    )


def quoted(value: str) -> str:
    """A value of a query, whatever signs it has."""
    escaped = value.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def percent(part: float, whole: float) -> str:
    """``60 %``; with a digit more where it is small."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.1f} %" if 0 < share < 10 else f"{share:.0f} %"
