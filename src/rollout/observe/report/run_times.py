"""What took how long, from a run's events: intervals of trajectories, calls of tools, replicas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from rollout.observe.events import (
    BatchEnded,
    BatchStarted,
    Event,
    EventsDropped,
    LoopBlocked,
    ReplicaChanged,
    ReplicaSampled,
    RequestEnded,
    RequestPlaced,
    RewardEnded,
    RunEnded,
    RunStarted,
    SpanEnded,
    ToolEnded,
    TrajectoryEnded,
    TrajectoryEvent,
    TrajectoryStarted,
    TurnEnded,
    UserEnded,
)
from rollout.observe.report.call_times import CallTimes
from rollout.observe.report.trajectory_times import (
    DECODE,
    PLACE,
    PREFILL,
    QUEUE,
    REWARD,
    SPAN,
    TOOL,
    USER,
    Interval,
    TrajectoryTimes,
)
from rollout.observe.report.under_way import UnderWay
from rollout.seeds import split_session
from rollout.types import NOT_PARSED, UNKNOWN_TOOL

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


@attrs.define
class ReplicaTimes:
    """One replica.

    Attributes:
        serves_from: When it first served.
        losses: When it was lost, each time with the reason.
        requests: Those that have ended.
        under_way: When each that has not ended was sent to it.
    """

    name: str
    serves_from: float | None = None
    losses: list[tuple[float, str]] = attrs.field(factory=list)
    requests: list[RequestEnded] = attrs.field(factory=list)
    under_way: list[float] = attrs.field(factory=list)
    capacity: int = 0


@attrs.define
class RunTimes:
    """A run, the last one where its file holds several.

    Attributes:
        calls: When something was asked of it.
        has_ended: Whether its end is recorded.
        tools: Calls that have ended.
        calls_under_way: When each that has not ended began.
        dropped: Events that are missing.
        endings: Of the trajectories that have ended, in their order.
        errors: Ends of calls that raised.
    """

    run: RunStarted | None = None
    calls: CallTimes = attrs.field(factory=CallTimes)
    has_ended: bool = False
    batches: list[BatchStarted] = attrs.field(factory=list)
    trajectories: dict[int, TrajectoryTimes] = attrs.field(factory=dict)
    tools: dict[str, list[ToolEnded]] = attrs.field(factory=dict)
    calls_under_way: dict[str, list[float]] = attrs.field(factory=dict)
    replicas: dict[str, ReplicaTimes] = attrs.field(factory=dict)
    blocked: list[LoopBlocked] = attrs.field(factory=list)
    dropped: int = 0
    endings: list[TrajectoryEnded] = attrs.field(factory=list)
    errors: list[BatchEnded] = attrs.field(factory=list)
    _turns: dict[str, tuple[int, str]] = attrs.field(factory=dict)
    _requests: list[RequestEnded] = attrs.field(factory=list)
    _under_way: UnderWay = attrs.field(factory=UnderWay)

    @property
    def is_known(self) -> bool:
        """Whether there is anything to tell."""
        return self.start is not None

    @property
    def start(self) -> float | None:
        """When something was asked of it first."""
        return next(iter(self.calls.began.values()), None)

    @property
    def end(self) -> float:
        """Of the last call; of a run that grows, its latest event."""
        return self.calls.latest

    @property
    def length(self) -> float:
        """Seconds from the start to the end, with the trainer's own time between calls."""
        return 0.0 if self.start is None else max(0.0, self.end - self.start)

    @property
    def duration(self) -> float:
        """Seconds in which something was asked of it."""
        return self.calls.seconds(self.calls.began)

    def losses_of(self, replica: str) -> list[str]:
        """Why a replica was lost, each time; that its channel is closed after the run is none."""
        start = -math.inf if self.start is None else self.start
        losses = self.replicas[replica].losses
        return [why for at, why in losses if start <= at < self.end]

    def calls_of(self, tool: str, known: Collection[str]) -> list[ToolEnded]:
        """Calls of a tool that have ended; of tools that there are not, where it stands for them.

        Args:
            known: Names of all tools.
        """
        if tool != UNKNOWN_TOOL:
            return self.tools.get(tool, [])
        unknown = [calls for name, calls in self.tools.items() if name not in known]
        return [call for calls in unknown for call in calls]

    def take(self, event: Event) -> None:
        """One more event."""
        self.calls.take(event)
        if isinstance(event, TrajectoryEvent):
            self._under_way.take(event)
        match event:
            case BatchStarted():
                self.batches.append(event)
            case BatchEnded() if event.error:
                self.errors.append(event)
            case RunEnded():
                self.has_ended = True
            case LoopBlocked():
                self.blocked.append(event)
            case EventsDropped():
                self.dropped += event.count
            case ReplicaChanged() | ReplicaSampled() | RequestPlaced() | RequestEnded():
                self._take_of_engines(event)
            case _:
                self._take_of_trajectory(event)

    def _take_of_engines(self, event: Event) -> None:
        assert isinstance(event, ReplicaChanged | ReplicaSampled | RequestPlaced | RequestEnded)
        replica = self.replicas.setdefault(event.replica, ReplicaTimes(event.replica))
        if isinstance(event, ReplicaChanged):
            replica.capacity = event.capacity or replica.capacity
            if event.state == "lost":
                replica.losses.append((event.at, event.why))
            elif event.state == "serving" and replica.serves_from is None:
                replica.serves_from = event.at
        elif isinstance(event, RequestEnded):
            replica.requests.append(event)
            self._requests.append(event)

    def _take_of_trajectory(self, event: Event) -> None:
        match event:
            case TrajectoryStarted():
                times = self._named(event)
                if times.began is None:
                    times.began = event.at
                    self._add_wait(times, event)
            case TrajectoryEnded():
                self.endings.append(event)
                times = self._named(event)
                times.ended, times.ending = event.at, (event.outcome, event.generated_tokens)
                times.began = event.began if times.began is None else times.began
            case TurnEnded():
                for request in event.requests:
                    self._turns[request] = event.turn + 1, event.path
                if event.held_s:
                    carried = self._times(event.trajectory).carried
                    carried[event.path] = carried.get(event.path, 0.0) + event.held_s
            case ToolEnded():
                name = event.tool or NOT_PARSED
                self.tools.setdefault(name, []).append(event)
                note = f"error: {event.error}" if event.is_error else ""
                self._add(event.trajectory, TOOL, event, name, event.turn, note, event.path)
            case UserEnded():
                self._add(event.trajectory, USER, event)
            case RewardEnded() if event.trajectory:
                self._add(event.trajectory, REWARD, event, note=event.error)
            case SpanEnded():
                self._add(event.trajectory, SPAN, event, event.name, note=event.error)
            case _:
                pass

    def _add_wait(self, times: TrajectoryTimes, event: TrajectoryStarted) -> None:
        """Of calls that were given all of their trajectories at once, it waited since then."""
        called = next((each for each in self.batches if each.batch == event.batch), None)
        if called is not None and called.trajectories and event.at > called.at:
            times.intervals.append(Interval(PLACE, called.at, event.at))

    def _times(self, number: int) -> TrajectoryTimes:
        return self.trajectories.setdefault(number, TrajectoryTimes(""))

    def _named(self, event: TrajectoryStarted | TrajectoryEnded) -> TrajectoryTimes:
        times = self._times(event.trajectory)
        times.name, times.batch = f"{event.uid}/{event.member}", event.batch
        times.step, times.validate = event.step, event.validate
        return times

    def _add(
        self,
        number: int,
        phase: str,
        event: ToolEnded | UserEnded | RewardEnded | SpanEnded,
        label: str = "",
        turn: int | None = None,
        note: str = "",
        path: str = "",
    ) -> None:
        number_of_turn = None if turn is None else turn + 1
        interval = Interval(phase, event.began, event.at, label, number_of_turn, note, path)
        self._times(number).intervals.append(interval)

    def settle(self) -> None:
        """Give trajectories their requests, whose turns are known only after them, and what has
        not ended.
        """
        for event in self._requests:
            if event.trajectory:
                self._times(event.trajectory).intervals += self._parts(event)
        self._requests = []
        if not self.dropped:  # else what seems not to have ended may have done so untold
            self._settle_under_way()

    def _settle_under_way(self) -> None:
        for number, begun in self._under_way.begun.items():
            for request in begun.requests.values():
                self.replicas[request.replica].under_way.append(request.at)
            for call in begun.calls.values():
                self.calls_under_way.setdefault(call.tool or NOT_PARSED, []).append(call.at)
            if number in self.trajectories:
                self.trajectories[number].intervals += begun.intervals(self.end)

    def _parts(self, event: RequestEnded) -> Iterable[Interval]:
        turn, path = self._turns.get(event.request, (None, split_session(event.session)[1]))
        at = event.began
        for phase, seconds in (
            (QUEUE, event.queue_s),
            (PREFILL, event.prefill_s),
            (DECODE, event.decode_s),
        ):
            if seconds > 0:
                yield Interval(phase, at, at + seconds, event.replica, turn, _note(event), path)
            at += seconds


def _note(event: RequestEnded) -> str:
    cached = f", {event.cached_tokens:,} of its prompt cached" if event.cached_tokens else ""
    ended = "" if event.finish_reason in ("", "stop") else f", ended by {event.finish_reason}"
    return f"{event.tokens:,} tokens{cached}{ended}"


def times_of(events: Iterable[Event]) -> RunTimes:
    """The times of the last run that these events are of."""
    times = RunTimes()
    for event in events:
        if isinstance(event, RunStarted):
            times = RunTimes(run=event)
        times.take(event)
    times.settle()
    return times
