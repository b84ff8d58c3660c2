"""The router: which replica gets which request. One synchronous decision each, and its counts.

The load of a replica is the number of tokens that its requests are expected to compute. Loads and
prices lie in NumPy rows with a column for each replica, so that a decision is one sum, one product
and one search, and does not walk over objects.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING

import attrs
import msgspec
import numpy as np

from rollout.engine.routing.records import Dispatch, ReplicaState, RouterStatistics
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from rollout.engine.core import EngineLoad

STRATEGIES = ("estimated_seconds", "least_requests", "round_robin")

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
#: More than turns add to a number of requests.
TIE_SLACK = 0.01
#: Holders of a group's prompt that are remembered, the latest: more of them decide nothing.
MAX_HOLDERS = 8
#: Trajectories that are remembered; a later turn of an older one is placed like a first one.
MAX_SESSIONS = 100_000
#: Replicas that `repr` names.
SHOWN = 8


class _Group(msgspec.Struct, eq=False):
    """Trajectories with one prompt."""

    prompt_tokens: int  # of the shortest prompt that one of them began with
    #: Where trajectories began or moved last, with the epoch of the cache that got the prompt.
    holders: dict[ReplicaState, int] = msgspec.field(default_factory=dict)
    members: int = 0  # that are remembered

    def add_holder(self, replica: ReplicaState) -> None:
        """Note that a replica gets the prompt now."""
        self.holders.pop(replica, None)
        self.holders[replica] = replica.cache_epoch
        if len(self.holders) > MAX_HOLDERS:
            del self.holders[next(iter(self.holders))]


class _Session(msgspec.Struct, eq=False, gc=False):
    """A trajectory: where its last request went, and how much of it is in the cache there."""

    group_id: str
    replica: ReplicaState
    cache_epoch: int = 0
    tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """How many tokens of it its replica still has."""
        return self.tokens if self.cache_epoch == self.replica.cache_epoch else 0


class Router:
    """Which replica gets the next request; see ``docs/routing.md``.

    It owns no task and no clock: every method returns at once, and `now` is the caller's clock, in
    seconds that never go back. Left out, `now` is the last one seen.

    Args:
        strategy: ``estimated_seconds`` (least tokens in flight, by measured speed),
            ``least_requests`` or ``round_robin``.
        move_margin: With ``least_requests``, a trajectory moves when its replica has more than
            this many requests beyond the least loaded one.
        move_margin_s: With ``estimated_seconds``, a trajectory moves when another replica should
            be done by more than this many seconds sooner, its lost prefix computed again.

    Raises:
        ConfigError: There is no such strategy.
    """

    def __init__(
        self,
        *,
        strategy: str = "estimated_seconds",
        move_margin: int = 16,
        move_margin_s: float = 0.5,
    ) -> None:
        if strategy not in STRATEGIES:
            known = ", ".join(map(repr, STRATEGIES))
            fault = f"router.strategy = {strategy!r}: expected one of {known}"
            raise ConfigError(fault, (fault,))
        self._offered: tuple[ReplicaState, ...] = ()
        self._strategy = strategy
        self._by_seconds = strategy == "estimated_seconds"
        self._by_requests = strategy == "least_requests"
        margins = {"estimated_seconds": move_margin_s, "least_requests": move_margin + TIE_SLACK}
        self._margin = margins.get(strategy, sys.float_info.max)  # in turn, none ever moves
        self._weight_version: int | None = None
        self._now = self._compared_at = 0.0
        self._decisions = self._moves = self._refusals = self._ended = 0
        self._mean_new_tokens = float(FIRST_NEW_TOKENS)
        self._new_tokens = FIRST_NEW_TOKENS  # the mean, rounded
        self._token_s = STEP_S / DOUBLING_BATCH  # of a replica of median speed, in a large batch
        self._turn = 0.0
        self._states: dict[str, ReplicaState] = {}
        self._by_slot: list[ReplicaState] = []
        # Numbers of all replicas, by slot.
        self._loads = np.empty(0)  # in flight, by weight; infinite where a replica gets nothing
        self._paces = np.empty(0)  # measured steps per second, as if alone; 0: not known
        self._prices = np.empty(0)  # seconds for a token
        self._scores = np.empty(0)
        #: In the order of their last requests.
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._groups: dict[str, _Group] = {}

    def __repr__(self) -> str:
        shown = [f"{r.name} {r.in_flight}/{r.capacity} {r.state}" for r in self.replicas[:SHOWN]]
        if len(self.replicas) > SHOWN:
            shown.append(f"and {len(self.replicas) - SHOWN} more")
        return f"<Router {self._strategy}: {', '.join(shown) or 'no replicas'}>"

    @property
    def replicas(self) -> tuple[ReplicaState, ...]:
        """The replicas that are offered, in the order in which they were added first."""
        return self._offered

    @property
    def has_room(self) -> bool:
        """Whether any replica may get a request now."""
        return bool(self._offered and self._loads[self._loads.argmin()] < math.inf)

    # Replicas.

    def add(
        self, name: str, capacity: int, *, weight: float = 1.0, weight_version: int = 0
    ) -> ReplicaState:
        """Offer a replica for work. One that was here before comes back with its counts.

        Args:
            capacity: Requests that it accepts at once, running and queued.
            weight: Its share of the load beside replicas of weight 1.
            weight_version: Version of the model's weights that it has.

        Raises:
            ValueError: It is offered already; nothing has changed.
        """
        replica = self._states.get(name)
        if replica is not None and replica.is_offered:
            raise ValueError(f"replica {name!r} is routed to already")
        if capacity < 1 or not weight > 0:
            raise ValueError(
                f"replica {name!r}: capacity = {capacity}, weight = {weight}; expected at least "
                "1 and more than 0"
            )
        if replica is None:
            replica = self._states[name] = ReplicaState(name, len(self._by_slot), capacity)
            self._by_slot.append(replica)
            self._loads = np.append(self._loads, math.inf)
            self._paces = np.append(self._paces, 0.0)
            self._prices = np.append(self._prices, self._token_s)
            self._scores = np.empty(len(self._loads))
        replica.capacity, replica.weight = capacity, weight
        replica.is_offered, replica.is_draining = True, False
        replica.last_report, replica.was_idle = None, True
        replica.cache_epoch += 1
        self._list_offered()
        self._check_weights(replica, weight_version)
        return replica

    def remove(self, name: str) -> None:
        """Give a replica no more work; its trajectories are placed again at their next turn.

        What it has in flight is counted until it is released.

        Raises:
            KeyError: There is no such replica.
        """
        replica = self._get(name)
        replica.is_offered = False
        self._list_offered()
        self._refresh(replica)

    def drain(self, name: str) -> None:
        """Give a replica nothing new until `resume`; what it has in flight continues.

        Its trajectories are placed again at their next turn. It is empty when its `in_flight` is 0.

        Raises:
            KeyError: There is no such replica.
        """
        replica = self._get(name)
        replica.is_draining = True
        self._refresh(replica)

    def resume(self, name: str) -> None:
        """End `drain`; raises as that does."""
        replica = self._get(name)
        replica.is_draining = False
        self._refresh(replica)

    def require_weights(self, version: int | None) -> None:
        """From now on only replicas with this version of the weights get work; None: all do."""
        self._weight_version = version
        for replica in self._offered:
            self._check_weights(replica, replica.weight_version)

    def set_weights(self, name: str, version: int) -> None:
        """A replica has other weights now; what its cache holds is of no more use.

        Raises:
            KeyError: There is no such replica.
        """
        replica = self._get(name)
        if version != replica.weight_version:
            replica.cache_epoch += 1
        self._check_weights(replica, version)

    def _check_weights(self, replica: ReplicaState, version: int) -> None:
        replica.weight_version = version
        replica.is_stale = self._weight_version not in (None, version)
        self._refresh(replica)

    def _find(self, name: str) -> ReplicaState | None:
        """The replica that is offered under this name."""
        replica = self._states.get(name)
        return replica if replica is not None and replica.is_offered else None

    def _get(self, name: str) -> ReplicaState:
        replica = self._find(name)
        if replica is None:
            raise KeyError(f"no replica {name!r} is routed to")
        return replica

    def _list_offered(self) -> None:
        self._offered = tuple(replica for replica in self._by_slot if replica.is_offered)

    def _refresh(self, replica: ReplicaState) -> None:
        """Write a replica's load, or that it gets nothing; call after any change of it."""
        load = replica.turn
        if self._by_seconds:
            load = replica.tokens / replica.weight + load * TIE
        elif self._by_requests:
            load = replica.in_flight / replica.weight + load * TIE
        is_open = (
            replica.in_flight < replica.capacity
            and replica.is_offered
            and not (replica.is_draining or replica.is_stale)
        )
        self._loads[replica.slot] = load if is_open else math.inf

    # Requests.

    def assign(
        self,
        session_id: str,
        *,
        group_id: str = "",
        prompt_tokens: int = 0,
        max_new_tokens: int | None = None,
        avoid: str | None = None,
    ) -> Dispatch | None:
        """Choose a replica for a request and count it there; None: no replica has room.

        Args:
            session_id: The trajectory; its requests stay together while that is worth it.
            group_id: Trajectories that begin with the same prompt; "" for a trajectory on its own.
            prompt_tokens: Length of the request's prompt.
            max_new_tokens: The most that it may generate; None: not known.
            avoid: A replica that has just refused it.

        Returns:
            The request with its `replica`; hand it to `release` when it is gone.
        """
        new_tokens = self._new_tokens
        if max_new_tokens is not None and max_new_tokens < new_tokens:
            new_tokens = max_new_tokens
        session = self._sessions.get(session_id)
        pinned = session.replica if session is not None and session.replica.is_offered else None
        cached = self._find_prefixes(session, group_id, prompt_tokens)
        # What the request itself takes; a token of its answer takes a whole step.
        work = new_tokens * (1 + DOUBLING_BATCH) + PREFILL_WEIGHT * prompt_tokens
        replica = self._choose(work, cached, pinned, None if avoid is None else self._find(avoid))
        if replica is None:
            self._refusals += 1
            return None
        self._decisions += 1
        self._moves += replica is not pinned and pinned is not None
        cached_tokens = cached.get(replica, 0)
        fresh_tokens = prompt_tokens - cached_tokens
        load = new_tokens + PROMPT_LOAD * fresh_tokens
        self._count(replica, load)
        if session is None:
            session = self._add_session(session_id, group_id, replica, prompt_tokens)
        else:
            self._sessions.move_to_end(session_id)
        if session.group_id and not (replica is pinned and cached_tokens):
            self._groups[session.group_id].add_holder(replica)
        session.replica, session.cache_epoch = replica, replica.cache_epoch
        session.tokens = prompt_tokens
        return Dispatch(session_id, replica, prompt_tokens, fresh_tokens, new_tokens, load)

    def renew(self, dispatch: Dispatch, prompt_tokens: int) -> None:
        """A request in flight continues there after so many tokens, which are computed again."""
        session = self._sessions.get(dispatch.session_id)
        if session is not None and session.replica is dispatch.replica:
            session.cache_epoch, session.tokens = dispatch.replica.cache_epoch, prompt_tokens

    def _count(self, replica: ReplicaState, load: float) -> None:
        """Count a request where it goes.

        Start-time fair queueing (Goyal et al. 1996): a replica that was passed over catches up by
        one turn.
        """
        if replica.turn > self._turn:
            self._turn = replica.turn
        replica.turn = self._turn + 1 / replica.weight
        replica.served += 1
        replica.in_flight += 1
        replica.tokens += load
        self._refresh(replica)

    def release(self, dispatch: Dispatch, *, generated: int | None = None) -> None:
        """A request is gone.

        Args:
            generated: Tokens that it generated; None where it was cut short, refused or lost,
                from which nothing is learned.

        Raises:
            ValueError: It was released before; nothing has changed.
        """
        if not dispatch.is_counted:
            raise ValueError(f"{dispatch!r} is not in flight")
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
            self._mean_new_tokens += (generated - self._mean_new_tokens) / count
            self._new_tokens = max(1, round(self._mean_new_tokens))
            session = self._sessions.get(dispatch.session_id)
            if session is not None and session.replica is replica:
                session.tokens = dispatch.prompt_tokens + generated
        self._refresh(replica)

    def forget(self, session_id: str) -> None:
        """The trajectory has ended; nothing is kept for it, nor for its group after the last."""
        session = self._sessions.pop(session_id, None)
        if session is None or not session.group_id:
            return
        group = self._groups[session.group_id]
        group.members -= 1
        if group.members == 0:
            del self._groups[session.group_id]

    def _find_prefixes(
        self, session: _Session | None, group_id: str, prompt_tokens: int
    ) -> dict[ReplicaState, int]:
        """How many tokens of a request's prompt the replicas have in their caches."""
        cached: dict[ReplicaState, int] = {}
        if (group := self._groups.get(group_id)) is not None:
            tokens = min(group.prompt_tokens, prompt_tokens)
            for holder, epoch in group.holders.items():
                if epoch == holder.cache_epoch:
                    cached[holder] = tokens
        elif (trunk := self._sessions.get(group_id)) is not None:
            # A branch of a trajectory that is in no group.
            cached[trunk.replica] = min(trunk.cached_tokens, prompt_tokens)
        if session is not None:
            cached[session.replica] = min(session.cached_tokens, prompt_tokens)
        return cached

    def _add_session(
        self, session_id: str, group_id: str, replica: ReplicaState, prompt_tokens: int
    ) -> _Session:
        """Remember a trajectory, and forget the oldest where they are too many."""
        session = self._sessions[session_id] = _Session(group_id, replica)
        if group_id:
            group = self._groups.setdefault(group_id, _Group(prompt_tokens))
            group.prompt_tokens = min(group.prompt_tokens, prompt_tokens)
            group.members += 1
        if len(self._sessions) > MAX_SESSIONS:
            self.forget(next(iter(self._sessions)))
        return session

    def _choose(
        self,
        work: float,
        cached: dict[ReplicaState, int],
        pinned: ReplicaState | None,
        avoid: ReplicaState | None,
    ) -> ReplicaState | None:
        """The replica with the least load, its prefix counted; None: none may get a request.

        The pinned one, unless another is better by more than the margin.

        Args:
            work: Tokens that the request takes the time of where nothing of it is cached.
            cached: How many tokens of its prompt each replica has in its cache.
            pinned: The replica of the trajectory's last request, if it is offered.
            avoid: A replica that gets nothing this time.
        """
        scores = self._scores
        if not self._offered:
            return None
        if self._by_seconds:
            np.add(self._loads, work, scores)
            for holder, tokens in cached.items():
                scores[holder.slot] -= PREFILL_WEIGHT * tokens
            np.multiply(scores, self._prices, scores)
        else:
            np.copyto(scores, self._loads)
        if avoid is not None:
            scores[avoid.slot] = math.inf
        chosen = self._by_slot[scores.argmin()]
        if pinned is not None and scores[pinned.slot] <= scores[chosen.slot] + self._margin:
            chosen = pinned
        return chosen if scores[chosen.slot] < math.inf else None

    # Measured speeds.

    def report(self, name: str, load: EngineLoad, *, now: float | None = None) -> None:
        """Take in what a replica says of itself; a report of one that is not offered is ignored.

        Args:
            now: When the report came. An engine that says when it measured is believed instead,
                because what waited to be read says nothing of the engine's speed.
        """
        replica = self._find(name)
        now = self._now = max(self._now, 0.0 if now is None else now)
        if replica is None:
            return
        at = load.measured_at_s or now
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
        known = [paces[each.slot] for each in self._offered if paces[each.slot]]
        usual = float(np.median(known)) if known else 1 / STEP_S
        speeds = np.where(paces > 0, np.clip(paces / usual, *SPEED_RANGE), 1.0)
        speeds[np.abs(speeds - 1) <= SPEED_TOLERANCE] = 1.0
        self._token_s = 1 / (usual * DOUBLING_BATCH)
        self._prices = self._token_s / speeds

    def statistics(self) -> RouterStatistics:
        """A snapshot of everything that decisions are made from."""
        counted = [each for each in self._by_slot if each.is_offered or each.in_flight]
        prices = self._prices
        replicas = tuple(
            attrs.evolve(
                each,
                load_s=float(each.tokens * prices[each.slot]),
                speed=float(self._token_s / prices[each.slot]),
            )
            for each in counted
        )
        return RouterStatistics(
            strategy=self._strategy,
            decisions=self._decisions,
            moves=self._moves,
            refusals=self._refusals,
            in_flight=sum(each.in_flight for each in counted),
            sessions=len(self._sessions),
            groups=len(self._groups),
            mean_new_tokens=self._mean_new_tokens,
            token_s=self._token_s,
            replicas=replicas,
        )
