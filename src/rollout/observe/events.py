"""What happens in a run, as typed events.

Times are seconds since the start of the run on the event loop's clock: `at` is when an event
happened, `began` when what has ended began. Trajectories have a number, one for each in a run,
which `TrajectoryStarted` and `TrajectoryEnded` explain.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

#: Of the events' fields, for readers of files; changes when an older reader would misread them.
FORMAT = 1


def _kind(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag=_kind,
    tag_field="kind",
    gc=False,
):
    """Something that happened at a time.

    Attributes:
        at: When, in seconds since the start of the run.
    """

    at: float


# The run and its calls.


class RunStarted(Event):
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
    config: dict[str, Any] = {}


class RunEnded(Event):
    """The runtime was closed; missing where the process was killed."""


class BatchStarted(Event):
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


class BatchEnded(Event):
    """It ended.

    Attributes:
        began: When `BatchStarted` was.
        error: What it raised, in words; empty where it returned.
        metrics: Of the batch, as in `RolloutBatch.metrics`; empty for a stream.
    """

    batch: int
    began: float
    error: str = ""
    metrics: dict[str, float] = {}


class GroupEnded(Event):
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


# A trajectory.


class TrajectoryEvent(Event):
    """Something that happened to one trajectory.

    Attributes:
        trajectory: Its number in the run, from 1.
    """

    trajectory: int


class TrajectoryStarted(TrajectoryEvent):
    """An attempt at it has a place and begins.

    Attributes:
        batch: The call that admitted it.
        step, uid, group, member, validate: As in `Identity`.
        attempt: From 1; a later one starts over.
    """

    batch: int
    step: int
    uid: str
    group: int
    member: int
    validate: bool = False
    attempt: int = 1


class TrajectoryEnded(TrajectoryEvent):
    """It has its outcome, and its reward. One that never got a place ends without having started.

    Attributes:
        began: When its first attempt got its place; `at`, where it got none.
        outcome, reason, limit_source, trainable: As in `Trajectory`.
        reward: Of its own; what `collect` and `stream_groups` learn of a group's reward function is
            in `GroupEnded`.
        cause: What was raised, "Type: message"; empty where nothing was.
        turns: Turns of the model.
        num_turns: As in `Trajectory`.
        rows: Rows of training data.
        prompt_tokens, generated_tokens, observation_tokens: Over all of its rows.
        generation_s, tool_s, tool_calls, tool_errors: As in `Trajectory.metrics`.
        discarded_tokens: Sampled and dropped, as after the loss of a replica.
        resumes, restarts: Requests that resumed elsewhere, or restarted.
        drift: How its text and its tokens differ, where they were compared ("none": they do not).
        versions: The oldest and the newest weight version that sampled it; empty without tokens.
    """

    batch: int
    step: int
    uid: str
    group: int
    member: int
    began: float
    outcome: str
    reason: str = ""
    validate: bool = False
    limit_source: str = ""
    cause: str = ""
    trainable: bool = False
    reward: float | None = None
    turns: int = 0
    num_turns: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    observation_tokens: int = 0
    generation_s: float = 0.0
    tool_s: float = 0.0
    tool_calls: int = 0
    tool_errors: int = 0
    discarded_tokens: int = 0
    resumes: int = 0
    restarts: int = 0
    drift: str = ""
    versions: tuple[int, ...] = ()


class TurnStarted(TrajectoryEvent):
    """The model is asked for a turn.

    Attributes:
        turn: Its number in its conversation, from 0.
        path: The conversation: "" is the main one; see `Identity`.
    """

    turn: int
    path: str = ""


class TurnEnded(TrajectoryEvent):
    """The model's turn is there, or was cut short.

    Attributes:
        began: When it was asked for.
        requests: Ids of the requests that were made for it, in order; none where it got no place.
        prompt_tokens: That stood before it.
        cached_tokens: Those of them that the engine did not compute.
        generated_tokens: Sampled.
        held_s: Seconds of it in which the trajectory waited to be carried to another call.
        finish_reason: "stop", "length", "abort", "error", …; empty where there was no answer.
        cut_by: What ended it before the model did; see `AssistantTurn`.
    """

    turn: int
    began: float
    path: str = ""
    requests: tuple[str, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    held_s: float = 0.0
    finish_reason: str = ""
    cut_by: str = ""


class RequestPlaced(TrajectoryEvent):
    """A request was sent to a replica.

    Attributes:
        trajectory: 0 for a request that belongs to none.
        session: The conversation that asks, as the engines know it: ``step/uid/member#path``.
        request: Its id.
        replica: Which one.
        queue_s: For how long it had waited for that.
    """

    session: str
    request: str
    replica: str
    queue_s: float


class RequestEnded(TrajectoryEvent):
    """A request has its last answer, or nobody waits for it any more.

    Its time is ``at - began = queue_s + prefill_s + decode_s``.

    Attributes:
        session, request, replica, queue_s: As in `RequestPlaced`.
        began: When a place was asked for.
        prefill_s: From the place to its first token; to its end, where none came.
        decode_s: From its first token to its end.
        prompt_tokens, cached_tokens, tokens: Of the prompt; not computed of that; sampled.
        finish_reason: As the engine said; "lost" with its replica, "cancelled" where the wait ended
            before.
    """

    session: str
    request: str
    replica: str
    began: float
    queue_s: float
    prefill_s: float
    decode_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    finish_reason: str = ""


class ToolStarted(TrajectoryEvent):
    """A call begins: it may still have to wait for its tool's place.

    Attributes:
        tool: Its name; empty where the call could not be parsed.
        turn, path: Of the turn that asked for it.
        position: Among the calls of that turn, from 0.
    """

    tool: str
    turn: int
    position: int = 0
    path: str = ""


class ToolEnded(TrajectoryEvent):
    """A call has its result.

    Attributes:
        tool, turn, position, path: As in `ToolStarted`.
        began: When it did.
        call_id: That the model's format gave it.
        is_refused: It was answered without having started: the tool is unknown, the arguments do
            not fit, or there were too many.
        is_error: Whether the result is an error.
        error: The beginning of its text then.
        characters: Of the result, before it is truncated.
    """

    tool: str
    turn: int
    began: float
    position: int = 0
    path: str = ""
    call_id: str = ""
    is_refused: bool = False
    is_error: bool = False
    error: str = ""
    characters: int = 0


class UserEnded(TrajectoryEvent):
    """A simulated user has answered.

    Attributes:
        began: When it was asked.
    """

    began: float


class RewardEnded(TrajectoryEvent):
    """A reward function has answered, or failed.

    Attributes:
        trajectory: Whose reward it is; 0 for one of a whole group.
        batch, group: Where it belongs.
        began: When it was asked.
        reward: None where it is not known, and for a group.
        error: What went wrong; empty where nothing did.
    """

    batch: int
    group: int
    began: float
    reward: float | None = None
    error: str = ""


class SpanEnded(TrajectoryEvent):
    """A function of the user's with `rollout.trace` has returned, or raised.

    Attributes:
        name: Given to the decorator, or the function's.
        span: Its number in the trajectory, from 1.
        parent: That of the traced function that called it; 0 for none.
        began: When it was called.
        error: What it raised; empty where it returned.
    """

    name: str
    span: int
    began: float
    parent: int = 0
    error: str = ""


# The engines.


class ReplicaChanged(Event):
    """A replica is in another state than before.

    Attributes:
        replica: Its name.
        state: "starting", "serving", "lost", "restarting", "given up", "removed" or "closed".
        why: Where something went wrong.
        capacity: Requests that it holds at once, once it serves.
    """

    replica: str
    state: str
    why: str = ""
    capacity: int = 0


class ReplicaSampled(Event):
    """What a replica said that it was doing; about once in `channel.heartbeat_s`.

    Attributes:
        replica: Its name.
        running, queued: Requests in the engine, computed and waiting.
        in_flight: Requests sent and not known to be gone.
        zombies: Cancelled ones among them.
        capacity: Requests that it holds at once.
        kv_used: Share of its KV cache, 0 … 1.
        tokens_per_s: That it samples.
        generated_tokens, preemptions: Since it started.
        prompt_tokens, cached_tokens: Of the requests that it has answered since the run began, and
            those of them that it had computed before.
    """

    replica: str
    running: int = 0
    queued: int = 0
    in_flight: int = 0
    zombies: int = 0
    capacity: int = 0
    kv_used: float = 0.0
    tokens_per_s: float = 0.0
    generated_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class WeightsUpdated(Event):
    """The replicas have other weights, or could not load them.

    Attributes:
        began: When the update did.
        version, mode: As `update_weights` was given them.
        error: What went wrong; empty where nothing did.
    """

    began: float
    version: int
    mode: str
    error: str = ""


class MemoryChanged(Event):
    """The replicas have released memory, or have it back.

    Attributes:
        began: When that began.
        action: "sleep" or "wake_up".
        tags: What was released or taken back: "weights", "kv_cache".
        error: What went wrong; empty where nothing did.
    """

    began: float
    action: str
    tags: tuple[str, ...] = ()
    error: str = ""


# The event loop.


class RuntimeSampled(Event):
    """Counts of the runtime, once in a second.

    Attributes:
        admitted, running, finished: Trajectories; see `RuntimeStatistics`.
        waiting_requests: That wait for a place on a replica.
        generated_tokens, tool_calls: Since the start.
        lag_s: The longest delay of the loop since the last sample.
    """

    admitted: int
    running: int
    finished: int
    waiting_requests: int = 0
    generated_tokens: int = 0
    tool_calls: int = 0
    lag_s: float = 0.0


class LoopBlocked(Event):
    """The event loop did not come round for longer than 0.1 s, until `at`.

    Attributes:
        seconds: For how long.
        cause: Whose code was in the way, with file and line, or what else it was.
        is_starved: The machine did not run the loop's thread: no code's fault.
    """

    seconds: float
    cause: str = ""
    is_starved: bool = False


class EventsDropped(Event):
    """So many events are missing in this file before this one: they came faster than it took them.

    Attributes:
        count: How many.
    """

    count: int


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
