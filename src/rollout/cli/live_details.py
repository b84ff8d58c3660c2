"""What a terminal shows below the line of progress: groups, engines, waits, tools, the slowest."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from rollout.observe.explanation import KINDS, short_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rollout.engine.pool.replica import ReplicaStatistics
    from rollout.observe.explanation import Explanation, TrajectoryWaits

#: Lines of replicas, of tools and of trajectories at most.
REPLICAS, TOOLS, SLOWEST = 8, 4, 3

Detail = tuple[str, str]


def live_details(explanation: Explanation, replicas: Sequence[ReplicaStatistics]) -> list[Detail]:
    """Labels and texts, a line each; a label stands before the first line of its kind only."""
    rows = [row for call in explanation.calls for row in call.trajectories]
    groups = sum(call.groups for call in explanation.calls)
    details = []
    if groups:
        open_groups = {(row.group, row.uid) for row in rows}
        details.append(("groups", f"{groups - len(open_groups):,} of {groups:,} ended"))
    details.append(("engines", _replicas(replicas)))
    if rows:
        kinds = Counter(row.waits[0].kind for row in rows)
        told = (f"{number:,} {KINDS[kind]}" for kind, number in kinds.most_common())
        details.append(("now", " · ".join(told)))
    details += _labelled("tools", _tools(rows))
    details += _labelled("slowest", _slowest(rows))
    return details


def _replicas(replicas: Sequence[ReplicaStatistics]) -> str:
    told = [f"{each.name} {_load(each)}" for each in replicas[:REPLICAS]]
    rest = replicas[REPLICAS:]
    if rest:
        told.append(f"{len(rest)} more {sum(each.in_flight for each in rest):,}")
    return " · ".join(told)


def _load(replica: ReplicaStatistics) -> str:
    return f"{replica.in_flight:,}" if replica.state == "serving" else replica.state


def _tools(rows: Iterable[TrajectoryWaits]) -> Iterator[str]:
    """Calls under way, of those tools first that have been waited for longest."""
    waits: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for wait in row.waits:
            if wait.kind == "tool":
                waits[wait.name.strip("'")].append(wait.seconds)
    for name, seconds in sorted(waits.items(), key=lambda item: -max(item[1]))[:TOOLS]:
        yield f"{name} {len(seconds):,} under way, the longest for {short_seconds(max(seconds))}"


def _slowest(rows: Iterable[TrajectoryWaits]) -> Iterator[str]:
    started = [row for row in rows if row.seconds is not None]
    for row in sorted(started, key=lambda row: -(row.seconds or 0.0))[:SLOWEST]:
        waits = "; ".join(map(str, row.waits[:2]))
        yield f"{row.uid}/{row.member} {short_seconds(row.seconds or 0.0)}: {waits}"


def _labelled(label: str, lines: Iterable[str]) -> Iterator[Detail]:
    for at, line in enumerate(lines):
        yield ("" if at else label), line
