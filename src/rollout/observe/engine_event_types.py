"""What happens to the engines and to the event loop."""

from __future__ import annotations

from rollout.observe.event_base import Event


class ReplicaChanged(Event, frozen=True, kw_only=True):
    """A replica is in another state than before.

    Attributes:
        replica: Its name.
        state: "starting", "serving", "lost", "restarting", "removed" or "closed".
        why: Where something went wrong.
        capacity: Requests that it computes at once, or holds where its engine does not say so; 0
            unless it serves.
    """

    replica: str
    state: str
    why: str = ""
    capacity: int = 0


class ReplicaSampled(Event, frozen=True, kw_only=True):
    """What a replica said that it was doing; about once in `channel.heartbeat_s`.

    Attributes:
        replica: Its name.
        running, queued: Requests in the engine, computed and waiting.
        in_flight: Requests sent and not known to be gone.
        zombies: Cancelled ones among them.
        capacity: Requests that it computes at once, or holds where its engine does not say so.
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


class WeightsUpdated(Event, frozen=True, kw_only=True):
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


class MemoryChanged(Event, frozen=True, kw_only=True):
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


class RuntimeSampled(Event, frozen=True, kw_only=True):
    """Counts of the runtime, once in a second.

    Attributes:
        admitted, running, carried, finished: Trajectories; see `RuntimeStatistics`.
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
    carried: int = 0


class LoopBlocked(Event, frozen=True, kw_only=True):
    """The event loop did not come round for longer than 0.1 s, until `at`.

    Attributes:
        seconds: For how long.
        cause: Whose code was in the way, with file and line, or what else it was.
        is_starved: The machine did not run the loop's thread: no code's fault.
    """

    seconds: float
    cause: str = ""
    is_starved: bool = False


class EventsDropped(Event, frozen=True, kw_only=True):
    """So many events are missing in this file before this one: they came faster than it took them.

    Attributes:
        count: How many.
    """

    count: int
