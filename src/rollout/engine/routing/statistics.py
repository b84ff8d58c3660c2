"""What the router knows, as data for people and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from rollout.engine.routing.replica_set import ReplicaSet
    from rollout.engine.routing.replica_state import ReplicaState


@attrs.frozen
class ReplicaLoad:
    """One replica as the router sees it.

    Attributes:
        state: "serving", "full", "draining", "stale" (other weights than asked for), "held" (for
            a request that starts alone) or "gone" (still with requests in flight).
        weight: Its share of the load beside replicas of weight 1.
        in_flight: Requests sent and not known to be gone.
        capacity: Requests that it accepts at once.
        served: Requests assigned since the start.
        load_s: Estimated seconds until it has done what it has.
        slowness: Seconds that it takes for what the usual replica does in one.
        tokens_per_s: Tokens that it generated per second, by its last two reports.
        kv_used: Share of its KV cache in use, by its last report.
    """

    name: str
    state: str
    weight: float
    in_flight: int
    capacity: int
    served: int
    load_s: float
    slowness: float
    tokens_per_s: float
    kv_used: float


@attrs.frozen
class RouterStatistics:
    """The router now.

    Attributes:
        decisions: Requests assigned since the start.
        moves: Of these, requests of a trajectory that went elsewhere than the one before.
        refusals: Questions that were answered with "no replica has room".
        in_flight: Requests sent and not known to be gone, over all replicas.
        sessions: Trajectories that are remembered.
        groups: Groups of which a trajectory is remembered.
        mean_new_tokens: What a request is expected to generate.
        step_s: Seconds of a decoding step, whatever its batch.
        token_s: Further seconds of a step for each request in the batch.
        prompt_s: Seconds to compute a prompt token.
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
    step_s: float
    token_s: float
    prompt_s: float
    replicas: tuple[ReplicaLoad, ...]


def load_of(replica: ReplicaState, replica_set: ReplicaSet) -> ReplicaLoad:
    """A snapshot of one replica."""
    return ReplicaLoad(
        name=replica.name,
        state=replica.state,
        weight=replica.weight,
        in_flight=replica.in_flight,
        capacity=replica.capacity,
        served=replica.served,
        load_s=replica_set.load_s(replica),
        slowness=replica.speed.slowness,
        tokens_per_s=replica.speed.tokens_per_s,
        kv_used=replica.kv_used,
    )
