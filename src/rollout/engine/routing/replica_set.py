"""All replicas, what each has to do, and how long that should take.

Scores live in arrays with a column for each replica, and change with every request that is sent or
gone; a decision is then one product and one search over them, not a walk over objects. Of few
replicas the numbers are added up one by one, which takes less than to begin with an array does.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from rollout.engine.routing.cost_model import CostModel
from rollout.engine.routing.replica_state import ReplicaState

if TYPE_CHECKING:
    from rollout.engine.core import EngineLoad
    from rollout.engine.routing.dispatch import Dispatch

#: How often a second of prefill counts. The request waits for it, every other request of that
#: replica waits meanwhile, and what is computed pushes other prefixes out of the cache.
#: At 4 too much gathers in the benchmark: large groups with long prompts take 6 % longer.
PREFILL_WEIGHT = 3.0
#: The same where the batch is full: requests that wait for a place wait longer too. From 6 to 9
#: the benchmark's queued workload differs by no more than its noise.
FULL_PREFILL_WEIGHT = 6.0
MOST_KV_USED = 0.999
#: Orders replicas of equal score by whose turn it is, and no others.
TIE_S = 1e-9
#: Replicas within this share of the median speed count as equally fast: noise breaks no tie.
SPEED_TOLERANCE = 0.15
#: Expected tokens of a request before any has ended, and how many requests the mean remembers.
NEW_TOKENS, MEAN_OF = 256, 512
#: Costs change when all replicas have reported, or after this time, should one be silent.
LONGEST_ROUND_S = 3.0
#: Rows of the arrays: seconds of work that a replica has, further seconds for each token that a
#: request generates or has computed, requests in flight by weight, its turn among new trajectories.
LOAD, PER_NEW, PER_FRESH, REQUESTS, ROUNDS = range(5)
#: The most replicas that are few.
FEW = 4
Rows = npt.NDArray[np.float64]


class ReplicaSet:
    """Replicas with their counts; knows no trajectory.

    Attributes:
        costs: What time costs on a replica of usual speed.
        replicas: Those offered, in the order in which they were added first.
        open_count: How many of them may get a request now.
        mean_new_tokens: Mean of the tokens that requests generated.
    """

    def __init__(self) -> None:
        self.costs = CostModel()
        self.replicas: tuple[ReplicaState, ...] = ()
        self.open_count = 0
        self.mean_new_tokens = float(NEW_TOKENS)
        self._expected = NEW_TOKENS
        self._ended = 0
        self._turn = self._round = 0.0
        self._costs_updated_at = 0.0
        self._reported: set[ReplicaState] = set()
        self._states: dict[str, ReplicaState] = {}
        self._by_slot: list[ReplicaState] = []
        self._slots, self._is_few = range(0), True
        self._amounts = np.ones(3)
        self._amount = _view(self._amounts)
        self._use(_empty_rows(8))

    def _use(self, rows: Rows) -> None:
        self._rows = rows
        self._seconds = rows[:3]  # a view: load, per new token, per fresh prompt token
        self._scores = np.zeros(rows.shape[1])
        self._score = _view(self._scores)
        self._score_of = self._score.__getitem__
        self._argmin = self._scores.argmin
        self._views = [_view(row) for row in rows]

    # Which replicas there are.

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

    def add(self, name: str, capacity: int, weight: float, now: float) -> ReplicaState:
        """Offer a replica; one that was there before comes back with its counts, its cache cold."""
        replica = self._states.get(name)
        if replica is None:
            slot = len(self._by_slot)
            if slot == self._rows.shape[1]:
                self._use(np.hstack([self._rows, _empty_rows(slot)]))
            replica = self._states[name] = ReplicaState(name, slot, capacity)
            self._by_slot.append(replica)
            self._slots = range(slot + 1)
            self._is_few = slot < FEW
        replica.capacity, replica.weight = capacity, weight
        replica.is_offered, replica.is_draining, replica.is_isolated = True, False, False
        replica.backlog, replica.waiting, replica.backlog_at = 0.0, 0.0, now
        replica.kv_used, replica.batch_limit = 0.0, math.inf
        replica.foreign = replica.foreign_tokens = 0
        replica.cache_epoch += 1
        replica.speed.restart()
        self._list()
        self._set_costs(replica, replica.speed.slowness)
        self.refresh(replica)
        return replica

    def remove(self, name: str) -> None:
        """Offer a replica no more; what it has in flight is still counted."""
        replica = self.get(name)
        replica.is_offered = False
        self._reported.discard(replica)
        self._list()
        self.refresh(replica)

    def _list(self) -> None:
        self.replicas = tuple(replica for replica in self._by_slot if replica.is_offered)

    # What they have to do.

    @property
    def in_flight(self) -> int:
        """Requests sent and not known to be gone, over all replicas, those removed included."""
        return sum(replica.in_flight for replica in self._by_slot)

    @property
    def counted(self) -> list[ReplicaState]:
        """The replicas that are offered, and those removed with requests in flight."""
        return [r for r in self._by_slot if r.is_offered or r.in_flight]

    def expected_tokens(self, max_new_tokens: int | None) -> int:
        """What a request should generate, given what others did."""
        if max_new_tokens is None or self._expected < max_new_tokens:
            return self._expected
        return max_new_tokens

    def send(self, dispatch: Dispatch, now: float) -> None:
        """Count a request that goes to `dispatch.replica`."""
        replica, fresh = dispatch.replica, dispatch.fresh_tokens
        self._settle(replica, now)
        # Start-time fair queueing (Goyal et al. 1996): a replica that was passed over catches up by
        # one turn.
        if replica.turn > self._turn:
            self._turn = replica.turn
        replica.turn = self._turn + 1 / replica.weight
        if dispatch.pinned is not replica:
            if replica.round > self._round:
                self._round = replica.round
            replica.round = self._round + 1 / replica.weight
        replica.served += 1
        replica.in_flight += 1
        replica.new_tokens += dispatch.new_tokens
        replica.sent_tokens += fresh
        if replica.beyond_batch > 0:
            replica.waiting += fresh
        else:
            replica.backlog += fresh
        dispatch.is_counted = True
        self.refresh(replica)

    def end(self, dispatch: Dispatch, generated: int | None, now: float) -> None:
        """A request is gone; with `generated` tokens where it ended by itself."""
        replica = dispatch.replica
        self._settle(replica, now)
        dispatch.is_counted = False
        if replica.waiting:
            # Its place in the batch is the next one's, whose prompt is computed now.
            self._admit(replica, replica.waiting / max(1.0, replica.beyond_batch))
        replica.in_flight -= 1
        replica.new_tokens -= dispatch.new_tokens
        if replica.in_flight == 0:
            replica.backlog = replica.waiting = 0.0
            replica.speed.was_idle = True
        if generated is not None:
            self._ended += 1
            # The first few, being the first to end, are the short ones: they count less.
            count = min(self._ended + 4, MEAN_OF)
            self.mean_new_tokens += (generated - self.mean_new_tokens) / count
            self._expected = max(1, round(self.mean_new_tokens))
        self.refresh(replica)

    def report(self, replica: ReplicaState, load: EngineLoad, now: float) -> None:
        """Take in what a replica says of itself; own dispatches that it covers no longer count."""
        self._settle(replica, now)
        replica.kv_used = min(max(load.kv_used, 0.0), MOST_KV_USED)
        # Learned from a queue, and kept without one: an engine that is not full just now will be
        # full again at the same number. One that runs more than that has shown otherwise.
        if load.queued or load.running > replica.batch_limit < math.inf:
            replica.batch_limit = max(1, load.running)
        foreign = max(0, load.running + load.queued - replica.in_flight)
        # One report alone may be older than the end of a request.
        replica.foreign_tokens = min(foreign, replica.foreign) * self._expected
        replica.foreign = foreign
        waiting = load.queued * replica.sent_tokens / max(1, replica.served)
        self._admit(replica, replica.waiting - waiting)
        if not (replica.in_flight or load.running or load.queued):
            replica.backlog = 0.0
        replica.speed.report(load, now)
        self._reported.add(replica)
        is_round = len(self._reported) >= len(self.replicas)
        if is_round or now - self._costs_updated_at >= LONGEST_ROUND_S:
            self._costs_updated_at = now
            self._reported.clear()
            self._update_costs()
        else:
            self.refresh(replica)

    def _admit(self, replica: ReplicaState, tokens: float) -> None:
        """So many prompt tokens wait no longer; fewer than 0: they had not been taken in yet."""
        replica.waiting = max(0.0, replica.waiting - tokens)
        replica.backlog = max(0.0, replica.backlog + tokens)

    def _settle(self, replica: ReplicaState, now: float) -> None:
        """Let the replica compute prompts up to now."""
        elapsed, replica.backlog_at = now - replica.backlog_at, now
        if replica.backlog and elapsed > 0:
            done = min(replica.backlog, elapsed / replica.prompt_s)
            replica.backlog -= done
            replica.speed.computed += done

    def _update_costs(self) -> None:
        """Make costs of what a round of reports says, for all and for each.

        All of a round together, so that it does not matter which reports first.
        """
        for replica in self.replicas:
            if replica.speed.latest is not None:
                self.costs.observe(replica.speed.latest, replica.speed.slowness)
        self.costs.fit()
        for replica in self.replicas:
            replica.speed.update(self.costs)
        usual = statistics.median(replica.speed.slowness for replica in self.replicas)
        for replica in self.replicas:
            slowness = replica.speed.slowness
            factor = usual if abs(slowness / usual - 1) <= SPEED_TOLERANCE else slowness
            self._set_costs(replica, factor)
            self.refresh(replica)

    def _set_costs(self, replica: ReplicaState, factor: float) -> None:
        slot, costs = replica.slot, self.costs
        replica.step_s = factor * costs.step_s
        replica.token_s = factor * costs.token_s
        replica.prompt_s = factor * costs.prompt_s
        self._views[PER_NEW][slot] = replica.step_s + replica.token_s

    def refresh(self, replica: ReplicaState) -> None:
        """Write a replica's load, or that it gets nothing; call after any change of it."""
        is_open = replica.in_flight < replica.capacity and replica.is_usable
        if is_open is not replica.is_open:
            replica.is_open = is_open
            self.open_count += 1 if is_open else -1
        slot, (load, _, per_fresh, requests, rounds) = replica.slot, self._views
        is_full = replica.beyond_batch >= 0
        per_fresh[slot] = replica.prompt_s * (FULL_PREFILL_WEIGHT if is_full else PREFILL_WEIGHT)
        if is_open:
            tie, weight = replica.turn * TIE_S, replica.weight
            load[slot] = self.load_s(replica) / weight + tie
            requests[slot] = replica.in_flight / weight + tie
            rounds[slot] = replica.round + tie
        else:
            load[slot] = requests[slot] = rounds[slot] = math.inf

    def load_s(self, replica: ReplicaState) -> float:
        """Seconds until a replica has done what it has, memory pressure included."""
        tokens = replica.new_tokens + replica.foreign_tokens
        seconds = replica.token_s * tokens + replica.prompt_s * (replica.backlog + replica.waiting)
        if replica.batch_limit * self.mean_new_tokens < tokens:
            # More than one batch: the steps of the others come afterwards.
            seconds += replica.step_s * (tokens / replica.batch_limit - self.mean_new_tokens)
        return seconds + replica.pressure_s if replica.kv_used else seconds

    # Choosing.

    def candidates(self, dispatch: Dispatch) -> list[ReplicaState]:
        """The replicas that may get a request now, in the order in which they were added."""
        return [r for r in self.replicas if r.is_open and r is not dispatch.avoid]

    def estimate(self, dispatch: Dispatch) -> memoryview[float]:
        """Seconds that each replica would need, by slot; infinite where it may get nothing.

        What a replica has to do, the request itself, and the prompt tokens that it would have to
        compute. Valid until the next call.
        """
        score, per_fresh, pinned = self._score, self._views[PER_FRESH], dispatch.pinned
        new, prompt = dispatch.new_tokens, dispatch.prompt_tokens
        if self._is_few:
            load, per_new = self._views[LOAD], self._views[PER_NEW]
            for slot in self._slots:
                score[slot] = load[slot] + new * per_new[slot] + prompt * per_fresh[slot]
        else:
            self._amount[PER_NEW], self._amount[PER_FRESH] = new, prompt
            self._amounts.dot(self._seconds, self._scores)  # faster than np.dot
        for holder in dispatch.holders:
            if holder is not pinned:
                slot = holder.slot
                score[slot] -= dispatch.shared_tokens * per_fresh[slot]
        if pinned is not None:
            score[pinned.slot] -= dispatch.warm_tokens * per_fresh[pinned.slot]
        if dispatch.avoid is not None:
            score[dispatch.avoid.slot] = math.inf
        return score

    def fastest(self) -> ReplicaState | None:
        """The replica with the fewest seconds in the last estimate; None: none may get anything."""
        slot = min(self._slots, key=self._score_of) if self._is_few else self._argmin()
        return None if self._score[slot] == math.inf else self._by_slot[slot]

    def least(self, row: int, dispatch: Dispatch) -> ReplicaState | None:
        """The replica with the smallest value in `REQUESTS` or `ROUNDS`; None: none is open."""
        np.copyto(self._scores, self._rows[row])
        if dispatch.avoid is not None:
            self._score[dispatch.avoid.slot] = math.inf
        return self.fastest()


def _empty_rows(size: int) -> Rows:
    """Columns of replicas that get nothing."""
    rows = np.zeros((5, size))
    rows[[LOAD, REQUESTS, ROUNDS]] = math.inf
    return rows


def _view(row: Any) -> memoryview[float]:
    """Reads and writes single numbers several times as fast as the array itself."""
    return cast("memoryview[float]", memoryview(row))
