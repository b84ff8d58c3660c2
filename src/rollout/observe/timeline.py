"""The time of a run in the Chrome trace format, which Perfetto, Chrome and speedscope open.

A process of the format is a group of lanes, a thread of it a lane: one for each replica (and more
where its requests overlap), one for each trajectory (and more where its tools or conversations do),
one for the event loop, one for calls and one for what changes all engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from rollout.errors import RolloutError
from rollout.observe import events as told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.observe.events import AnyEvent

#: The file's name within the directory of a run.
TIMELINE = "timeline.json"
Slice = dict[str, Any]

DRIVER, TRAJECTORIES, FIRST_REPLICA = 1, 2, 3
LOOP, CALLS, CHANGES = "event loop", "calls", "weights and memory"
#: What may be a part of what: of a smaller rank. Requests, calls and updates are parts of nothing.
_RANKS = {
    "run": 1,
    "loop": 2,
    "trajectory": 1,
    "turn": 2,
    "tool": 2,
    "user": 2,
    "reward": 2,
    "phase": 3,
    "function": 4,
}
#: Times are written in microseconds, as multiples of an eighth: a sum of such floats is exact, so
#: that a part which ends with its whole does so for readers too, which add beginning and duration.
TICKS_PER_US = 8


def write_timeline(events: Iterable[AnyEvent], path: str | Path) -> int:
    """Write the timeline of these events; how many slices it has.

    Raises:
        RolloutError: The file cannot be written.
    """
    timeline = Timeline()
    for event in events:
        timeline.take(event)
    slices = timeline.slices()
    try:
        Path(path).write_bytes(
            msgspec.json.encode({"traceEvents": slices, "displayTimeUnit": "ms"})
        )
    except OSError as error:
        raise RolloutError(f"{path}: cannot be written: {error.strerror}") from error
    return sum(each["ph"] == "X" for each in slices)


@attrs.frozen(kw_only=True)
class _Piece:
    """Something that lasts; its times are in microseconds."""

    name: str
    began: float
    ended: float
    category: str
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    #: With "s" a flow of this id begins here, with "f" it ends.
    flow: tuple[str, str] | None = None


@attrs.define(eq=False)
class _Lane:
    """Pieces that belong together; as many lanes as it takes for them to be within each other."""

    process: int
    name: str
    pieces: list[_Piece] = attrs.field(factory=list)

    def rows(self) -> list[list[_Piece]]:
        """In each row a piece is within another one or beside it."""
        rows: list[list[_Piece]] = []
        open_pieces: list[list[_Piece]] = []
        for piece in sorted(self.pieces, key=_outer_first):
            places = (at for at, outer in enumerate(open_pieces) if _has_room(outer, piece))
            at = next(places, len(rows))
            if at == len(rows):
                rows.append([])
                open_pieces.append([])
            rows[at].append(piece)
            open_pieces[at].append(piece)
        return rows


def _outer_first(piece: _Piece) -> tuple[float, float, int]:
    return piece.began, -piece.ended, _RANKS.get(piece.category, 0)


def _has_room(outer: list[_Piece], piece: _Piece) -> bool:
    """Whether it has a place in a row, of which these pieces may still last."""
    while outer and outer[-1].ended <= piece.began:
        outer.pop()
    return not outer or _is_within(piece, outer[-1])


def _is_within(piece: _Piece, outer: _Piece) -> bool:
    """Whether it is a part of the other one, and does not only happen meanwhile."""
    rank, outer_rank = _RANKS.get(piece.category, 0), _RANKS.get(outer.category, 0)
    is_part = rank > outer_rank or piece.category == outer.category == "function"
    return is_part and piece.ended <= outer.ended


class Timeline:
    """Gathers what happened, and lays it out in lanes."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._processes = {"driver": DRIVER, "trajectories": TRAJECTORIES}
        self._counters: list[Slice] = []
        self._instants: list[tuple[_Lane, float, str, dict[str, Any]]] = []
        self._run, self._offset_s = 0, 0.0
        self._first_wall_s: float | None = None
        self._trajectories: dict[tuple[int, int], _Lane] = {}
        self._running: dict[tuple[int, int], told.TrajectoryStarted] = {}
        self._last_at = 0.0
        self._driver(LOOP)

    def take(self, event: AnyEvent) -> None:
        """One more event, in their order."""
        if not isinstance(event, told.RunStarted):
            self._last_at = event.at
        match event:
            case told.RunStarted():
                self._end_running()
                self._run += 1
                first = self._first_wall_s = self._first_wall_s or event.wall_s
                self._offset_s = event.wall_s - first
            case told.BatchEnded():
                facts = {"batch": event.batch, "error": event.error}
                self._add(self._driver(CALLS), f"call {event.batch}", "call", event, facts)
            case told.LoopBlocked():
                name = "no CPU" if event.is_starved else "blocked"
                lane, facts = self._driver(LOOP), {"cause": event.cause}
                piece = (event.at - event.seconds, event.at)
                self._add(lane, name, "loop", event, facts, times=piece)
            case told.RuntimeSampled():
                counts = {"running": event.running, "carried": event.carried}
                self._count(DRIVER, "trajectories", event.at, counts)
                self._count(DRIVER, "loop lag", event.at, {"seconds": event.lag_s})
                waiting = {"waiting": event.waiting_requests}
                self._count(DRIVER, "requests without a place", event.at, waiting)
            case told.WeightsUpdated():
                facts = {"mode": event.mode, "error": event.error}
                name = f"weights {event.version}"
                self._add(self._driver(CHANGES), name, "weights", event, facts)
            case told.MemoryChanged():
                facts = {"tags": list(event.tags), "error": event.error}
                self._add(self._driver(CHANGES), event.action, "memory", event, facts)
            case told.ReplicaChanged():
                lane = self._replica(event.replica)
                self._instants.append(
                    (lane, self._offset_s + event.at, event.state, {"why": event.why})
                )
            case told.ReplicaSampled():
                process = self._replica(event.replica).process
                self._count(process, "requests", event.at, {"running": event.running})
                self._count(process, "KV cache", event.at, {"used": event.kv_used})
                self._count(process, "tokens/s", event.at, {"sampled": event.tokens_per_s})
            case told.TrajectoryEvent():
                self._take_trajectory(event)

    def _take_trajectory(self, event: told.TrajectoryEvent) -> None:
        match event:
            case told.TrajectoryStarted() | told.TrajectoryEnded():
                lane = self._trajectory(event)
                lane.name = f"{event.uid}/{event.member}"
                if event.batch:
                    lane.name = f"{event.batch}: {lane.name}"
                if isinstance(event, told.TrajectoryStarted):
                    self._running.setdefault((self._run, event.trajectory), event)
                else:
                    self._running.pop((self._run, event.trajectory), None)
                    name = f"{event.uid}/{event.member} {event.outcome}"
                    facts = {"reason": event.reason, "reward": event.reward, "step": event.step}
                    self._add(lane, name, "trajectory", event, facts)
            case told.TurnEnded():
                facts = {"tokens": event.generated_tokens, "end": event.finish_reason}
                if event.held_s:
                    facts["carried_s"] = event.held_s
                name = f"turn {event.turn}" + (f" #{event.path}" if event.path else "")
                self._add(self._trajectory(event), name, "turn", event, facts)
            case told.RequestEnded():
                self._take_request(event)
            case told.ToolEnded():
                facts = {"turn": event.turn, "is_error": event.is_error, "error": event.error}
                name = event.tool or "call that cannot be read"
                self._add(self._trajectory(event), name, "tool", event, facts)
            case told.UserEnded():
                self._add(self._trajectory(event), "user", "user", event, {})
            case told.RewardEnded() if event.trajectory:
                self._add(self._trajectory(event), "reward", "reward", event, {})
            case told.RewardEnded():
                name = f"reward of group {event.group}"
                self._add(self._driver("group rewards"), name, "reward", event, {})
            case told.SpanEnded():
                facts = {"error": event.error}
                self._add(self._trajectory(event), event.name, "function", event, facts)

    def _end_running(self) -> None:
        """A run is over, or was last heard of; so are trajectories that had not ended."""
        if self._last_at > 0:
            run = _Piece(
                name="running",
                began=_us(self._offset_s),
                ended=_us(self._offset_s + self._last_at),
                category="run",
            )
            self._driver(LOOP).pieces.append(run)
        for event in self._running.values():
            name, times = f"{event.uid}/{event.member} not ended", (event.at, self._last_at)
            self._add(self._trajectory(event), name, "trajectory", event, {}, times=times)
        self._running.clear()
        self._last_at = 0.0

    def _take_request(self, event: told.RequestEnded) -> None:
        """In its replica's lane, and its phases in its trajectory's."""
        placed, first = event.began + event.queue_s, event.at - event.decode_s
        facts = {
            "session": event.session,
            "tokens": event.tokens,
            "prompt_tokens": event.prompt_tokens,
            "cached_tokens": event.cached_tokens,
            "end": event.finish_reason,
        }
        self._add(
            self._replica(event.replica),
            event.session,
            "request",
            event,
            facts,
            times=(placed, event.at),
            flow=("f", event.request),
        )
        if not event.trajectory:
            return
        lane = self._trajectory(event)
        for name, began, ended in (
            ("queue", event.began, placed),
            ("prefill", placed, first),
            ("decode", first, event.at),
        ):
            flow = ("s", event.request) if name == "prefill" else None
            if ended > began or flow:
                self._add(lane, name, "phase", event, {}, times=(began, ended), flow=flow)

    def slices(self) -> list[Slice]:
        """All of it, as the format has it."""
        self._end_running()
        made = list(self._names())
        places: dict[int, tuple[int, int]] = {}
        thread = 0
        for lane in self._lanes.values():
            for number, pieces in enumerate(lane.rows() or [[]], 1):
                thread += 1
                places.setdefault(id(lane), (lane.process, thread))
                label = lane.name if number == 1 else f"{lane.name} ({number})"
                made.append(_named("thread_name", lane.process, thread, label))
                made.append(_sorted_at(lane.process, thread))
                for piece in pieces:
                    made += _slices_of(piece, lane.process, thread)
        for lane, at, name, facts in self._instants:
            process, row_thread = places[id(lane)]
            made.append(
                {
                    "ph": "i",
                    "s": "p",
                    "name": name,
                    "cat": "replica",
                    "pid": process,
                    "tid": row_thread,
                    "ts": _us(at),
                    "args": {key: value for key, value in facts.items() if value},
                }
            )
        return made + self._counters

    def _names(self) -> Iterator[Slice]:
        for name, process in self._processes.items():
            yield _named("process_name", process, 0, name)

    def _add(
        self,
        lane: _Lane,
        name: str,
        category: str,
        event: Any,
        facts: Mapping[str, Any],
        *,
        times: tuple[float, float] | None = None,
        flow: tuple[str, str] | None = None,
    ) -> None:
        began, ended = (event.began, event.at) if times is None else times
        lane.pieces.append(
            _Piece(
                name=name,
                began=_us(self._offset_s + began),
                ended=_us(self._offset_s + max(began, ended)),
                category=category,
                facts={key: value for key, value in facts.items() if value not in (None, "")},
                flow=flow,
            )
        )

    def _count(self, process: int, name: str, at: float, values: Mapping[str, float]) -> None:
        ts = _us(self._offset_s + at)
        self._counters.append(
            {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": ts, "args": values}
        )

    def _driver(self, name: str) -> _Lane:
        return self._lanes.setdefault((DRIVER, name), _Lane(DRIVER, name))

    def _replica(self, name: str) -> _Lane:
        process = self._processes.setdefault(
            f"replica {name}", FIRST_REPLICA + len(self._processes) - 2
        )
        return self._lanes.setdefault((process, name), _Lane(process, name))

    def _trajectory(self, event: told.TrajectoryEvent) -> _Lane:
        key = (self._run, event.trajectory)
        if key not in self._trajectories:
            lane = _Lane(TRAJECTORIES, f"trajectory {event.trajectory}")
            self._trajectories[key] = self._lanes[TRAJECTORIES, f"{key}"] = lane
        return self._trajectories[key]


def _us(seconds: float) -> float:
    return round(seconds * 1e6 * TICKS_PER_US) / TICKS_PER_US


def _slices_of(piece: _Piece, process: int, thread: int) -> Iterator[Slice]:
    """The slice of a piece, and the flow that begins or ends at it."""
    place = {"pid": process, "tid": thread, "ts": piece.began}
    dur = piece.ended - piece.began
    # Readers end a slice of no duration before they begin it; it is an instant of its lane.
    phase = {"ph": "X", "dur": dur} if dur else {"ph": "i", "s": "t"}
    facts = {"name": piece.name, "cat": piece.category, "args": dict(piece.facts)}
    yield {**phase, **facts, **place}
    if piece.flow is not None:
        end, flow_id = piece.flow
        flow = {"ph": end, "name": "request", "cat": "request", "id": flow_id, **place}
        yield flow | ({"bp": "e"} if end == "f" else {})


def _named(kind: str, process: int, thread: int, name: str) -> Slice:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _sorted_at(process: int, thread: int) -> Slice:
    order = {"sort_index": thread}
    return {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": order}
