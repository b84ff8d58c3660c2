"""What the router knows, as data for people and metrics."""

from __future__ import annotations

import attrs


@attrs.frozen
class ReplicaLoad:
    """One replica as the router sees it.

    Attributes:
        state: "serving", "full", "draining", "stale" (other weights than required) or "gone"
            (still with requests in flight).
        weight: Its share of the load beside replicas of weight 1.
        in_flight: Requests sent and not known to be gone.
        capacity: Requests that it accepts at once.
        served: Requests assigned since the start.
        tokens: Tokens that its requests in flight are expected to compute.
        load_s: Estimated seconds until it has computed them.
        speed: How fast it is beside the median replica; 1 until that is known.
        tokens_per_s: Tokens that it generated per second, by its last two reports.
        kv_used: Share of its KV cache in use, by its last report.
    """

    name: str
    state: str
    weight: float
    in_flight: int
    capacity: int
    served: int
    tokens: float
    load_s: float
    speed: float
    tokens_per_s: float
    kv_used: float


#: Fields that are those of a `ReplicaState`.
SAME_FIELDS = sorted({field.name for field in attrs.fields(ReplicaLoad)} - {"load_s", "speed"})


@attrs.frozen
class RouterStatistics:
    """The router now.

    Attributes:
        decisions: Requests assigned since the start.
        moves: Of these, requests of a trajectory that went elsewhere than the one before.
        refusals: Requests for which no replica had room.
        in_flight: Requests sent and not known to be gone, over all replicas.
        sessions: Trajectories that are remembered.
        groups: Groups of which a trajectory is remembered.
        mean_new_tokens: What a request is expected to generate.
        token_s: Seconds that a replica of median speed needs for a token.
        replicas: One entry for each replica, in the order in which they were added.
    """

    strategy: str
    decisions: int
    moves: int
    refusals: int
    in_flight: int
    sessions: int
    groups: int
    mean_new_tokens: float
    token_s: float
    replicas: tuple[ReplicaLoad, ...]
