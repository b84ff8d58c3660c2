"""How a run was over time, in equal steps; figures of its tools and replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollout.observe.report.trajectory_times import TOOL, covered

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from rollout.observe.events import RequestEnded, ToolEnded
    from rollout.observe.report.run_times import ReplicaTimes, RunTimes

    Values = npt.NDArray[np.float64]

#: Steps of a plot over time.
STEPS = 160
#: Shortest time in which tokens are said to have come, so that none come in no time.
LEAST_S = 1e-3


class ToolFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one tool; seconds of one call that ran, but for `total`.

    Attributes:
        calls: Those that have not ended are among them, with the seconds that they have taken.
        refused: Calls that were answered without having run.
        under_way: Calls that have not ended.
        waiting: For how long the first of them has been under way; 0 without any.
        usual: The longest that 19 in 20 of those took that have ended; None without any.
    """

    name: str
    calls: int
    refused: int
    errors: int
    mean: float
    median: float
    p95: float
    longest: float
    total: float
    under_way: int
    waiting: float
    usual: float | None


class ReplicaFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One replica while something was asked of the run; "over the run" is that time.

    Attributes:
        speed: Tokens a second, over the run.
        pace: Tokens a second of one request, while it was decoded; None without any.
        busy: Share of the run in which it had a request.
        at_once: Requests that it had, on average over the run.
        queue: Seconds that a request waited before it, on average.
        losses: How often it was lost.
    """

    name: str
    requests: int
    tokens: int
    speed: float | None
    pace: float | None
    busy: float | None
    at_once: float | None
    queue: float | None
    losses: int


def tool_figures(times: RunTimes, sums: Mapping[str, float]) -> list[ToolFigures]:
    """The run's tools, those first that took the most time.

    Args:
        sums: Calls and errors of each, as ``tool/TOOL/…``; empty: as many as there are events.
    """
    counted = [name[5:-6] for name in sums if name.endswith("/calls")]
    names = [*counted, *times.calls_under_way] if sums else [*times.tools, *times.calls_under_way]
    found = []
    for name in dict.fromkeys(names if times.is_known else ()):
        under_way = [times.end - began for began in times.calls_under_way.get(name, ())]
        figures = _tool(name, times.calls_of(name, counted), under_way)
        if name in counted:
            figures = msgspec.structs.replace(
                figures,
                calls=int(sums[f"tool/{name}/calls"]) + len(under_way),
                errors=int(sums[f"tool/{name}/errors"]),
            )
        found.append(figures)
    return sorted(found, key=lambda each: -each.total)


def _tool(name: str, calls: Sequence[ToolEnded], under_way: Sequence[float]) -> ToolFigures:
    took = [call.at - call.began for call in calls if not call.is_refused]
    refused = len(calls) - len(took)
    ran = [*took, *under_way] or [call.at - call.began for call in calls] or [0.0]
    seconds = np.array(ran)
    return ToolFigures(
        name=name,
        calls=len(calls) + len(under_way),
        refused=refused,
        errors=sum(call.is_error for call in calls),
        mean=float(seconds.mean()),
        median=float(np.median(seconds)),
        p95=float(np.quantile(seconds, 0.95)),
        longest=float(seconds.max()),
        total=float(seconds.sum()),
        under_way=len(under_way),
        waiting=max(under_way, default=0.0),
        usual=float(np.quantile(took, 0.95)) if took else None,
    )


def replica_figures(times: RunTimes) -> list[ReplicaFigures]:
    """The run's replicas, by name."""
    return [_replica(each, times) for each in _in_order(times)]


def _in_order(times: RunTimes) -> list[ReplicaTimes]:
    return sorted(times.replicas.values(), key=lambda each: (len(each.name), each.name))


def _replica(replica: ReplicaTimes, times: RunTimes) -> ReplicaFigures:
    requests, duration = replica.requests, times.duration
    tokens = sum(each.tokens for each in requests)
    starts, ends = (times.calls.open_before(at) for at in _held([replica], times.end))
    decoded = sum(each.decode_s for each in requests)
    return ReplicaFigures(
        name=replica.name,
        requests=len(requests) + len(replica.under_way),
        tokens=tokens,
        speed=tokens / duration if duration else None,
        pace=tokens / decoded if decoded > 0 else None,
        busy=covered(_pairs(starts, ends)) / duration if duration else None,
        at_once=float((ends - starts).sum()) / duration if duration else None,
        queue=float(np.mean([each.queue_s for each in requests])) if requests else None,
        losses=len(times.losses_of(replica.name)),
    )


def _held(replicas: Iterable[ReplicaTimes], until: float) -> tuple[Values, Values]:
    """When each request came to its replica, and when it ended; `until`: it has not ended."""
    starts, ends = [], []
    for replica in replicas:
        starts += [each.began + each.queue_s for each in replica.requests]
        ends += [each.at for each in replica.requests]
        starts += replica.under_way
        ends += [until] * len(replica.under_way)
    return np.array(starts), np.array(ends)


def series_of(times: RunTimes) -> dict[str, Any]:
    """Plots over time, for the page; its `step` is 0 where no time is known.

    `ends` are those of trajectories in seconds from the start of the run, in order.
    """
    if times.start is None or times.length <= 0:
        return _NOTHING
    edges = np.linspace(times.start, times.end, STEPS + 1)
    step = times.length / STEPS
    replicas = _in_order(times)
    requests = [each for replica in replicas for each in replica.requests]
    running = [
        (each.began, times.end if each.ended is None else each.ended)
        for each in times.trajectories.values()
        if each.began is not None
    ]
    tools = [
        (part.start, part.end)
        for each in times.trajectories.values()
        for part in each.intervals
        if part.phase == TOOL
    ]
    ended = [each.ended - times.start for each in times.trajectories.values() if each.ended]
    return {
        "step": step,
        "throughput": _listed(_rate(requests, edges) / step) if requests else [],
        "in_flight": _listed(_overlap(running, edges) / step) if running else [],
        "on_engines": _listed(_overlap(_pairs(*_held(replicas, times.end)), edges) / step),
        "with_tools": _listed(_overlap(tools, edges) / step),
        "replicas": [
            {
                "name": each.name,
                "values": _listed(_overlap(_pairs(*_held([each], times.end)), edges) / step),
            }
            for each in replicas
        ],
        "lag": _listed(_lag(times, edges)),
        "ends": _listed(np.sort(np.array(ended))),
    }


_NOTHING: dict[str, Any] = {
    "step": 0,
    "throughput": [],
    "in_flight": [],
    "on_engines": [],
    "with_tools": [],
    "replicas": [],
    "lag": [],
    "ends": [],
}


def _pairs(starts: Values, ends: Values) -> list[tuple[float, float]]:
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _overlap(
    pairs: Iterable[tuple[float, float]], edges: Values, weights: Values | None = None
) -> Values:
    """(STEPS,) seconds of all intervals that lie in each step; `weights`: for each second."""
    table = np.array(list(pairs), dtype=np.float64).reshape(-1, 2)
    if weights is None:
        weights = np.ones(len(table))
    starts, lengths = table[:, 0], np.maximum(table[:, 1] - table[:, 0], 0.0)
    sums = [float((np.clip(edge - starts, 0.0, lengths) * weights).sum()) for edge in edges]
    return np.diff(np.array(sums))


def _rate(requests: Sequence[RequestEnded], edges: Values) -> Values:
    """(STEPS,) tokens of each step, as if those of a request came evenly."""
    ends = np.array([each.at for each in requests])
    lengths = np.maximum(np.array([each.decode_s for each in requests]), LEAST_S)
    tokens = np.array([each.tokens for each in requests], dtype=np.float64)
    return _overlap(_pairs(ends - lengths, ends), edges, tokens / lengths)


def _lag(times: RunTimes, edges: Values) -> Values:
    """(STEPS,) the longest delay of the loop that began in each step."""
    longest = np.zeros(len(edges) - 1)
    for event in times.blocked:
        at = int(np.searchsorted(edges, event.at - event.seconds, side="right")) - 1
        if 0 <= at < len(longest):
            longest[at] = max(longest[at], event.seconds)
    return longest


def _listed(values: Values) -> list[float]:
    rounded: list[float] = np.round(np.maximum(values, 0.0), 4).tolist()
    return rounded
