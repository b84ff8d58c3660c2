"""What the router keeps of each replica and of each request, and what it shows of them."""

from __future__ import annotations

import attrs
import msgspec

from rollout.engine.core import EngineLoad


@attrs.define(eq=False)
class ReplicaState:
    """Counts and measurements of one replica; they stay while it is gone, in case it comes back.

    Attributes:
        slot: Its column in the rows.
        capacity: Requests that it accepts at once, running and queued.
        weight: Its share of the load beside replicas of weight 1.
        weight_version: Version of the model's weights that it has.
        in_flight: Requests sent and not known to be gone, cancelled ones included.
        served: Requests assigned since the start.
        is_offered: It exists and may be reached.
        is_draining: It gets nothing new for now.
        is_stale: Its weights are not the ones that are required.
        tokens: Tokens that the requests in flight are expected to compute.
        tokens_per_s: Tokens that it generated per second between its last two reports.
        turn: When it should be chosen next among equals; a request moves it on by 1 ÷ weight.
        cache_epoch: Grows when it loses its prefix cache.
        last_report: The last report and when it was made; None after a start.
        was_idle: It had nothing in flight for a while since that report.
        load_s: In a snapshot: estimated seconds until it has computed `tokens`.
        speed: In a snapshot: how fast it is beside the median replica; 1 until that is known.
    """

    name: str
    slot: int
    capacity: int
    weight: float = 1.0
    weight_version: int = 0
    in_flight: int = 0
    served: int = 0
    is_offered: bool = True
    is_draining: bool = False
    is_stale: bool = False
    tokens: float = 0.0
    tokens_per_s: float = 0.0
    turn: float = 0.0
    cache_epoch: int = 0
    last_report: tuple[EngineLoad, float] | None = None
    was_idle: bool = True
    load_s: float = 0.0
    speed: float = 1.0

    @property
    def state(self) -> str:
        """In a word: "serving", "full", "draining", "stale" or "gone"."""
        if not self.is_offered:
            return "gone"
        if self.is_draining:
            return "draining"
        if self.is_stale:
            return "stale"
        return "serving" if self.in_flight < self.capacity else "full"


class Dispatch(msgspec.Struct, eq=False, gc=False):
    """One request between its assignment to a replica and its end.

    Attributes:
        session_id: The trajectory.
        replica: The replica that it was assigned to.
        prompt_tokens: Length of its prompt, whatever of it is cached.
        fresh_tokens: Tokens of the prompt that the replica has to compute.
        new_tokens: How many tokens it is expected to generate.
        load: What it adds to the replica's `tokens`.
        is_counted: Whether it is in flight.
        request_id: Set when it is sent.
        start: Where its tokens begin in its generation.
        count: Tokens that it brought.
        is_discarded: The generation restarted after it; its tokens are dropped.
    """

    session_id: str
    replica: ReplicaState
    prompt_tokens: int
    fresh_tokens: int
    new_tokens: int
    load: float
    is_counted: bool = True
    request_id: str = ""
    start: int = 0
    count: int = 0
    is_discarded: bool = False

    def __repr__(self) -> str:
        return f"<Dispatch {self.session_id} to {self.replica.name}>"


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
        replicas: A copy of each replica that is there or has requests in flight, in their order.
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
    replicas: tuple[ReplicaState, ...]
