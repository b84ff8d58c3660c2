"""What the router knows of one replica."""

from __future__ import annotations

import math

import attrs

from rollout.engine.routing.cost_model import PROMPT_S, STEP_S, TOKEN_S, SpeedEstimate

#: Seconds that a half full KV cache is worth; grows as use ÷ (1 − use), as a queue does.
KV_PRESSURE_S = 0.15


@attrs.define(eq=False)
class ReplicaState:
    """Counts and measurements of one replica; kept while it is gone, in case it comes back.

    Attributes:
        slot: Its column in the set's arrays.
        capacity: Requests that it accepts at once, running and queued.
        weight: Its share of the load beside replicas of weight 1.
        weight_version: Version of the model's weights that it has.
        in_flight: Requests sent and not known to be gone, zombies included.
        served: Requests assigned since the start.
        is_offered: It exists and may be reached.
        is_draining: It gets nothing new for now.
        is_stale: Its weights are not the ones that are asked for.
        is_isolated: It gets nothing while a request starts there that must run alone.
        is_open: It may get a request now; kept by the set.
        new_tokens: Tokens that the requests in flight are expected to generate.
        foreign: Requests that its last report has beyond ours: other drivers share it.
        foreign_tokens: What those of them are expected to generate that two reports had.
        backlog: Prompt tokens taken into its batch that it should not have computed yet.
        waiting: Prompt tokens of requests that wait for a place in its batch.
        backlog_at: When that was true.
        sent_tokens: Prompt tokens that it was sent to compute since the start.
        kv_used: Share of its KV cache in use, by the last report.
        batch_limit: Size of its batch when requests last had to wait, or of a larger one since;
            infinite until they have to.
        turn: When it should be chosen next among equals; a request moves it on by 1 ÷ weight.
        round: The same for requests that begin a trajectory there.
        cache_epoch: Grows when it loses its prefix cache.
        step_s, token_s, prompt_s: What its time costs, its slowness included; see `costs`.
        speed: How fast it is.
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
    is_isolated: bool = False
    is_open: bool = False
    new_tokens: int = 0
    foreign: int = 0
    foreign_tokens: int = 0
    backlog: float = 0.0
    waiting: float = 0.0
    backlog_at: float = 0.0
    sent_tokens: int = 0
    kv_used: float = 0.0
    batch_limit: float = math.inf
    turn: float = 0.0
    round: float = 0.0
    cache_epoch: int = 0
    step_s: float = STEP_S
    token_s: float = TOKEN_S
    prompt_s: float = PROMPT_S
    speed: SpeedEstimate = attrs.field(factory=SpeedEstimate, repr=False)

    @property
    def has_room(self) -> bool:
        """Whether one more request would be accepted."""
        return self.in_flight < self.capacity

    @property
    def beyond_batch(self) -> float:
        """Requests that find no place in its batch; below 0 where there are places."""
        return self.in_flight + self.foreign - self.batch_limit

    @property
    def is_usable(self) -> bool:
        """Whether it may get requests at all, room aside."""
        return self.is_offered and not (self.is_draining or self.is_stale or self.is_isolated)

    @property
    def pressure_s(self) -> float:
        """Seconds that its KV cache is worth, by the last report."""
        return KV_PRESSURE_S * self.kv_used / (1 - self.kv_used)

    @property
    def state(self) -> str:
        """In a word: "gone", "draining", "stale", "held", "full" or "serving"."""
        if not self.is_offered:
            return "gone"
        if self.is_draining:
            return "draining"
        if self.is_stale:
            return "stale"
        if self.is_isolated:
            return "held"
        return "serving" if self.has_room else "full"
