"""What happens in a run, as typed events.

Times are seconds since the start of the run on the event loop's clock: `at` is when an event
happened, `began` when what has ended began. Trajectories have a number, one for each in a run,
which `TrajectoryStarted` and `TrajectoryEnded` explain.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.observe.engine_event_types import (
    EventsDropped,
    LoopBlocked,
    MemoryChanged,
    ReplicaChanged,
    ReplicaSampled,
    RuntimeSampled,
    WeightsUpdated,
)
from rollout.observe.event_base import Event, TrajectoryEvent
from rollout.observe.trajectory_event_types import (
    RequestEnded,
    RequestPlaced,
    RewardEnded,
    SpanEnded,
    ToolEnded,
    ToolStarted,
    TrajectoryEnded,
    TrajectoryStarted,
    TurnEnded,
    TurnStarted,
    UserEnded,
)

__all__ = [
    "FORMAT",
    "AnyEvent",
    "BatchEnded",
    "BatchStarted",
    "Event",
    "EventsDropped",
    "GroupEnded",
    "LoopBlocked",
    "MemoryChanged",
    "ReplicaChanged",
    "ReplicaSampled",
    "RequestEnded",
    "RequestPlaced",
    "RewardEnded",
    "RunEnded",
    "RunStarted",
    "RuntimeSampled",
    "SpanEnded",
    "ToolEnded",
    "ToolStarted",
    "TrajectoryEnded",
    "TrajectoryEvent",
    "TrajectoryStarted",
    "TurnEnded",
    "TurnStarted",
    "UserEnded",
    "WeightsUpdated",
]

#: Of the events' fields, for readers of files; changes when an older reader would misread them.
FORMAT = 1


class RunStarted(Event, frozen=True, kw_only=True):
    """A runtime was opened: the first event, and the first of each run appended to one file.

    Attributes:
        wall_s: Seconds since 1970 at that moment, which is `at` 0 of all that follow.
        format: Of the fields; see `FORMAT`.
        version: Of this library.
        run_seed: What all seeds derive from.
        config: The configuration, as `dump_config` gives it.
    """

    wall_s: float
    format: int = FORMAT
    version: str = ""
    run_seed: int = 0
    config: dict[str, Any] = msgspec.field(default_factory=dict)


class RunEnded(Event, frozen=True, kw_only=True):
    """The runtime was closed; missing where the process was killed."""


class BatchStarted(Event, frozen=True, kw_only=True):
    """A call of `generate`, `stream`, `collect` or `stream_groups` began.

    Attributes:
        batch: Its number in the run, from 0.
        call: The method's name.
        step: The trainer's.
        validate: Whether it validates.
        prompts: How many; 0 where they come as they are asked for.
        trajectories: How many, as far as it is known when it begins.
    """

    batch: int
    call: str
    step: int
    validate: bool = False
    prompts: int = 0
    trajectories: int = 0


class BatchEnded(Event, frozen=True, kw_only=True):
    """It ended.

    Attributes:
        began: When `BatchStarted` was.
        error: What it raised, in words; empty where it returned.
        metrics: Of the batch, as in `RolloutBatch.metrics`; empty for a stream.
    """

    batch: int
    began: float
    error: str = ""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class GroupEnded(Event, frozen=True, kw_only=True):
    """All members of a prompt have ended.

    Attributes:
        batch, group, uid: Which prompt it is: of this call, at this position.
        began: When its first member got a place; `at`, where none did.
        rewards: Of its members, in their order; None where it is not known.
        outcomes: Of its members, in their order.
        verdict: Of a call with a policy on groups: "accepted", or why it was not.
    """

    batch: int
    group: int
    uid: str
    began: float
    rewards: tuple[float | None, ...] = ()
    outcomes: tuple[str, ...] = ()
    verdict: str = ""


AnyEvent = (
    RunStarted
    | RunEnded
    | BatchStarted
    | BatchEnded
    | GroupEnded
    | TrajectoryStarted
    | TrajectoryEnded
    | TurnStarted
    | TurnEnded
    | RequestPlaced
    | RequestEnded
    | ToolStarted
    | ToolEnded
    | UserEnded
    | RewardEnded
    | SpanEnded
    | ReplicaChanged
    | ReplicaSampled
    | WeightsUpdated
    | MemoryChanged
    | RuntimeSampled
    | LoopBlocked
    | EventsDropped
)
