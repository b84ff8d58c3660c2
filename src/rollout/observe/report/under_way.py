"""What had begun and not ended when events stop: of a run that grows, or that was killed."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import attrs

from rollout.observe.events import (
    Event,
    RequestEnded,
    RequestPlaced,
    ToolEnded,
    ToolStarted,
    TrajectoryEnded,
    TrajectoryEvent,
    TrajectoryStarted,
    TurnEnded,
    TurnStarted,
)
from rollout.observe.report.trajectory_times import DECODE, QUEUE, TOOL, Interval
from rollout.seeds import split_session
from rollout.types import NOT_PARSED

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Said of its intervals.
NOT_ENDED = "has not ended"


class Turn(NamedTuple):
    """A turn that the model was asked for; `since`: it has had no request from then on."""

    number: int
    since: float


@attrs.define
class Begun:
    """What one trajectory has begun.

    Attributes:
        calls: Of tools, by path, turn and position.
        turns: By path: one at a time in each conversation.
        requests: By their ids.
    """

    calls: dict[tuple[str, int, int], ToolStarted] = attrs.field(factory=dict)
    turns: dict[str, Turn] = attrs.field(factory=dict)
    requests: dict[str, RequestPlaced] = attrs.field(factory=dict)

    def take(self, event: Event) -> None:
        """One more event of this trajectory."""
        match event:
            case ToolStarted():
                self.calls[event.path, event.turn, event.position] = event
            case ToolEnded():
                self.calls.pop((event.path, event.turn, event.position), None)
            case TurnStarted():
                self.turns[event.path] = Turn(event.turn, event.at)
            case TurnEnded():
                self.turns.pop(event.path, None)
            case RequestPlaced():
                self.requests[event.request] = event
            case RequestEnded():
                self.requests.pop(event.request, None)
                turn = self.turns.get(_path(event))
                if turn is not None:  # one that was lost is made again
                    self.turns[_path(event)] = turn._replace(since=event.at)
            case _:
                pass

    def intervals(self, end: float) -> Iterator[Interval]:
        """What it was in until then."""
        for call in self.calls.values():
            name = call.tool or NOT_PARSED
            yield Interval(TOOL, call.at, end, name, call.turn + 1, NOT_ENDED, call.path)
        asking = set()
        for request in self.requests.values():
            path = _path(request)
            asking.add(path)
            number = self.turns[path].number + 1 if path in self.turns else None
            if request.queue_s > 0:
                asked = request.at - request.queue_s
                yield Interval(QUEUE, asked, request.at, request.replica, number, "", path)
            # When its first token came is told with its end.
            yield Interval(DECODE, request.at, end, request.replica, number, NOT_ENDED, path)
        for path, turn in self.turns.items():
            if path not in asking:
                yield Interval(QUEUE, turn.since, end, "", turn.number + 1, NOT_ENDED, path)


def _path(event: RequestPlaced | RequestEnded) -> str:
    return split_session(event.session)[1]


@attrs.define
class UnderWay:
    """What all trajectories have begun; 0 stands for what belongs to none."""

    begun: dict[int, Begun] = attrs.field(factory=lambda: defaultdict(Begun))

    def take(self, event: TrajectoryEvent) -> None:
        """One more event; with its end, or a new start, nothing of a trajectory is under way."""
        if isinstance(event, TrajectoryStarted | TrajectoryEnded):
            self.begun.pop(event.trajectory, None)
        else:
            self.begun[event.trajectory].take(event)
