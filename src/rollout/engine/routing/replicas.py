"""What each replica has in flight, and how fast it works.

The load of a replica is the number of tokens that its requests are expected to compute. Loads and
prices lie in NumPy rows with a column for each replica, so that a decision is one sum, one product
and one search, and does not walk over objects.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import cast

import attrs
import msgspec
import numpy as np

from rollout.engine.core import EngineLoad

#: A prompt token that must be computed counts as so many tokens to generate: the request waits for
#: it, the replica's other requests wait meanwhile, and it pushes other prefixes out of the cache.
PREFILL_WEIGHT = 1.5
#: The part of that which stays in the load while the request runs.
PROMPT_LOAD = 0.5
#: Seconds of a decoding step, before any replica has reported.
STEP_S = 0.02
#: A step takes twice as long with this many requests as with one. A replica with a large batch is
#: thus not taken for a slow one, and a token of another request costs this share of a step.
DOUBLING_BATCH = 200.0
#: What a measured speed keeps at each report of a replica.
SPEED_MEMORY = 0.8
#: Replicas within this share of the median speed count as equally fast: noise breaks no tie.
SPEED_TOLERANCE = 0.15
SPEED_RANGE = (0.05, 20.0)
#: Reports nearer to each other than this say little about speed.
MIN_REPORT_S = 0.2
#: Seconds between two comparisons of all speeds.
COMPARISON_S = 1.0
#: Expected tokens of a request before any has ended, and how many requests the mean remembers.
FIRST_NEW_TOKENS, MEAN_REQUESTS = 256, 512
#: Orders replicas of equal load by whose turn it is, and no others.
TIE = 1e-9


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
        is_open: It may get a request now.
        tokens: Tokens that the requests in flight are expected to compute.
        kv_used: Share of its KV cache in use, by the last report.
        tokens_per_s: Tokens that it generated per second between its last two reports.
        turn: When it should be chosen next among equals; a request moves it on by 1 ÷ weight.
        cache_epoch: Grows when it loses its prefix cache.
        last_report: The last report and when it was made; None after a start.
        was_idle: It had nothing in flight for a while since that report.
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
    is_open: bool = False
    tokens: float = 0.0
    kv_used: float = 0.0
    tokens_per_s: float = 0.0
    turn: float = 0.0
    cache_epoch: int = 0
    last_report: tuple[EngineLoad, float] | None = None
    was_idle: bool = True

    @property
    def state(self) -> str:
        """In a word: "gone", "draining", "stale", "full" or "serving"."""
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
        prompt_tokens: Length of its prompt, whatever of it is cached.
        new_tokens: How many tokens it is expected to generate.
        pinned: The replica of the trajectory's last request; None for a new one, and where that
            replica is no longer offered. It may be full, draining or stale.
        warm_tokens: Tokens of the prompt that `pinned` has in its cache.
        holders: Replicas that have the prompt of the trajectory's group in their cache.
        shared_tokens: Length of that prompt.
        replica: The replica that it was assigned to.
        fresh_tokens: Tokens of the prompt that this replica has to compute.
        load: What it adds to the replica's `tokens`.
        is_counted: Whether it is in flight.
    """

    session_id: str
    prompt_tokens: int
    new_tokens: int
    pinned: ReplicaState | None = None
    warm_tokens: int = 0
    holders: Collection[ReplicaState] = ()
    shared_tokens: int = 0
    replica: ReplicaState = cast("ReplicaState", None)
    fresh_tokens: int = 0
    load: float = 0.0
    is_counted: bool = False

    def __repr__(self) -> str:
        where = self.replica.name if self.replica else "no replica yet"
        return f"<Dispatch {self.session_id} to {where}>"


class ReplicaSet:
    """All replicas with their loads; knows no trajectory.

    Attributes:
        offered: Those that are offered, in the order in which they were added first.
        open_count: How many of them may get a request now.
        mean_new_tokens: Mean of the tokens that requests generated.
        token_s: Seconds that a replica of median speed needs for a token in a large batch.
    """

    def __init__(self, *, by_requests: bool = False) -> None:
        self.offered: tuple[ReplicaState, ...] = ()
        self.open_count = 0
        self.mean_new_tokens = float(FIRST_NEW_TOKENS)
        self.token_s = STEP_S / DOUBLING_BATCH
        self._by_requests = by_requests
        self._ended = 0
        self._turn = 0.0
        self._compared_at = 0.0
        self._states: dict[str, ReplicaState] = {}
        self._by_slot: list[ReplicaState] = []
        # Numbers of all replicas, by slot.
        self._loads = np.empty(0)  # in flight, by weight; infinite where a replica gets nothing
        self._paces = np.empty(0)  # measured steps per second, as if alone; 0: not known
        self._prices = np.empty(0)  # seconds for a token
        self._scores = np.empty(0)

    def find(self, name: str) -> ReplicaState | None:
        """The replica that is offered under this name."""
        replica = self._states.get(name)
        return replica if replica is not None and replica.is_offered else None

    def get(self, name: str) -> ReplicaState:
        """The replica that is offered under this name; KeyError where there is none."""
        replica = self.find(name)
        if replica is None:
            raise KeyError(f"no replica {name!r} is routed to")
        return replica

    def add(self, name: str, capacity: int, weight: float) -> ReplicaState:
        """Offer a replica; one that was there before comes back with its counts, its cache cold."""
        replica = self._states.get(name)
        if replica is None:
            replica = self._states[name] = ReplicaState(name, len(self._by_slot), capacity)
            self._by_slot.append(replica)
            self._loads = np.append(self._loads, math.inf)
            self._paces = np.append(self._paces, 0.0)
            self._prices = np.append(self._prices, self.token_s)
            self._scores = np.empty(len(self._loads))
        replica.capacity, replica.weight = capacity, weight
        replica.is_offered, replica.is_draining = True, False
        replica.kv_used, replica.last_report, replica.was_idle = 0.0, None, True
        replica.cache_epoch += 1
        self._list_offered()
        self.refresh(replica)
        return replica

    def remove(self, name: str) -> None:
        """Offer a replica no more; what it has in flight is still counted."""
        replica = self.get(name)
        replica.is_offered = False
        self._list_offered()
        self.refresh(replica)

    def _list_offered(self) -> None:
        self.offered = tuple(replica for replica in self._by_slot if replica.is_offered)

    @property
    def counted(self) -> list[ReplicaState]:
        """The replicas that are offered, and those removed with requests in flight."""
        return [each for each in self._by_slot if each.is_offered or each.in_flight]

    def expect_tokens(self, max_new_tokens: int | None) -> int:
        """How many tokens a request should generate, by the mean of those before it."""
        expected = max(1, round(self.mean_new_tokens))
        return expected if max_new_tokens is None else min(expected, max_new_tokens)

    def send(self, dispatch: Dispatch) -> None:
        """Count a request that goes to `dispatch.replica`."""
        replica = dispatch.replica
        # Start-time fair queueing (Goyal et al. 1996): a replica that was passed over catches up
        # by one turn.
        self._turn = max(self._turn, replica.turn)
        replica.turn = self._turn + 1 / replica.weight
        replica.served += 1
        replica.in_flight += 1
        dispatch.load = dispatch.new_tokens + PROMPT_LOAD * dispatch.fresh_tokens
        replica.tokens += dispatch.load
        dispatch.is_counted = True
        self.refresh(replica)

    def end(self, dispatch: Dispatch, generated: int | None) -> None:
        """A request is gone; `generated`: its tokens, where it ended by itself."""
        replica = dispatch.replica
        dispatch.is_counted = False
        replica.in_flight -= 1
        replica.tokens -= dispatch.load
        if replica.in_flight == 0:
            replica.tokens, replica.was_idle = 0.0, True
        if generated is not None:
            self._ended += 1
            # The first few, being the first to end, are the short ones: they count less.
            count = min(self._ended + 4, MEAN_REQUESTS)
            self.mean_new_tokens += (generated - self.mean_new_tokens) / count
        self.refresh(replica)

    def refresh(self, replica: ReplicaState) -> None:
        """Write a replica's load, or that it gets nothing; call after any change of it."""
        is_open = (
            replica.in_flight < replica.capacity
            and replica.is_offered
            and not (replica.is_draining or replica.is_stale)
        )
        self.open_count += is_open - replica.is_open
        replica.is_open = is_open
        load = replica.in_flight if self._by_requests else replica.tokens
        load = load / replica.weight + replica.turn * TIE
        self._loads[replica.slot] = load if is_open else math.inf

    def report(self, replica: ReplicaState, load: EngineLoad, now: float) -> None:
        """Take in what a replica says of itself.

        Args:
            now: When the report came. An engine that says when it measured is believed instead,
                because what waited to be read says nothing of the engine's speed.
        """
        at = load.measured_at_s or now
        replica.kv_used = min(max(load.kv_used, 0.0), 1.0)
        if replica.last_report is not None:
            last, last_at = replica.last_report
            if 0 <= at - last_at < MIN_REPORT_S:
                return
            self._measure(replica, last, load, at - last_at)
        replica.last_report, replica.was_idle = (load, at), replica.in_flight == 0
        if now - self._compared_at >= COMPARISON_S:
            self._compared_at = now
            self._compare_speeds()

    def _measure(
        self, replica: ReplicaState, last: EngineLoad, load: EngineLoad, seconds: float
    ) -> None:
        tokens = load.generated_tokens - last.generated_tokens
        if seconds < 0 or tokens < 0:  # the counters of another engine than before
            return
        replica.tokens_per_s = tokens / seconds
        if replica.was_idle or not (tokens and last.running and load.running):
            return
        batch = (last.running + load.running) / 2
        pace = tokens / batch / seconds * (1 + batch / DOUBLING_BATCH)
        before = self._paces[replica.slot] or pace
        self._paces[replica.slot] = SPEED_MEMORY * before + (1 - SPEED_MEMORY) * pace

    def _compare_speeds(self) -> None:
        """Price a token on each replica by its speed beside the median of those offered."""
        paces = self._paces
        known = [paces[each.slot] for each in self.offered if paces[each.slot]]
        usual = float(np.median(known)) if known else 1 / STEP_S
        speeds = np.where(paces > 0, np.clip(paces / usual, *SPEED_RANGE), 1.0)
        speeds[np.abs(speeds - 1) <= SPEED_TOLERANCE] = 1.0
        self.token_s = 1 / (usual * DOUBLING_BATCH)
        self._prices = self.token_s / speeds

    def load_s(self, replica: ReplicaState) -> float:
        """Seconds until a replica should have done what it has in flight."""
        return float(replica.tokens * self._prices[replica.slot])

    def speed(self, replica: ReplicaState) -> float:
        """How fast a replica is beside the median one, as far as that is known."""
        return float(self.token_s / self._prices[replica.slot])

    def choose(
        self, dispatch: Dispatch, margin: float, avoid: ReplicaState | None
    ) -> ReplicaState | None:
        """The replica with the least load, its prefix counted; None: none may get a request.

        The pinned one, unless another is better by more than `margin`.
        """
        scores, prices, pinned = self._scores, self._prices, dispatch.pinned
        if not len(scores):
            return None
        if self._by_requests:
            np.copyto(scores, self._loads)
        else:
            steps = dispatch.new_tokens * (1 + DOUBLING_BATCH)  # the request's own time
            np.add(self._loads, steps + PREFILL_WEIGHT * dispatch.prompt_tokens, scores)
            np.multiply(scores, prices, scores)
            for holder in dispatch.holders:
                if holder is not pinned:
                    saved = PREFILL_WEIGHT * dispatch.shared_tokens
                    scores[holder.slot] -= saved * prices[holder.slot]
            if pinned is not None:
                scores[pinned.slot] -= PREFILL_WEIGHT * dispatch.warm_tokens * prices[pinned.slot]
        if avoid is not None:
            scores[avoid.slot] = math.inf
        slot = int(scores.argmin())
        least = scores[slot]
        if least == math.inf:
            return None
        if pinned is not None and scores[pinned.slot] <= least + margin:
            return pinned
        return self._by_slot[slot]

    def choose_next(self, avoid: ReplicaState | None) -> ReplicaState | None:
        """The open replica whose turn it is."""
        able = [each for each in self.offered if each.is_open and each is not avoid]
        return min(able, key=lambda each: each.turn, default=None)
