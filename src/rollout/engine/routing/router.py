"""The router: one synchronous decision for each request, and the counts for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.engine.routing.replicas import Dispatch, ReplicaSet
from rollout.engine.routing.sessions import Sessions
from rollout.engine.routing.statistics import SAME_FIELDS, ReplicaLoad, RouterStatistics
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from rollout.engine.core import EngineLoad
    from rollout.engine.routing.replicas import ReplicaState

STRATEGIES = ("estimated_seconds", "least_requests", "round_robin")
#: More than turns add to a number of requests.
TIE_SLACK = 0.01
#: Replicas that `repr` names.
SHOWN = 8


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
        self._strategy = strategy
        by_requests = strategy == "least_requests"
        self._margin = move_margin + TIE_SLACK if by_requests else move_margin_s
        self._replica_set = ReplicaSet(by_requests=by_requests)
        self._sessions = Sessions()
        self._weight_version: int | None = None
        self._now = 0.0
        self._decisions = self._moves = self._refusals = 0

    def __repr__(self) -> str:
        replicas = self._replica_set.offered
        shown = [f"{r.name} {r.in_flight}/{r.capacity} {r.state}" for r in replicas[:SHOWN]]
        if len(replicas) > SHOWN:
            shown.append(f"and {len(replicas) - SHOWN} more")
        return f"<Router {self._strategy}: {', '.join(shown) or 'no replicas'}>"

    @property
    def replicas(self) -> tuple[ReplicaState, ...]:
        """The replicas that are offered, in the order in which they were added first."""
        return self._replica_set.offered

    @property
    def has_room(self) -> bool:
        """Whether any replica may get a request now."""
        return self._replica_set.open_count > 0

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
        if self._replica_set.find(name) is not None:
            raise ValueError(f"replica {name!r} is routed to already")
        if capacity < 1 or not weight > 0:
            raise ValueError(
                f"replica {name!r}: capacity = {capacity}, weight = {weight}; expected at least "
                "1 and more than 0"
            )
        replica = self._replica_set.add(name, capacity, weight)
        self._check_weights(replica, weight_version)
        return replica

    def remove(self, name: str) -> None:
        """Give a replica no more work; its trajectories are placed again at their next turn.

        What it has in flight is counted until it is released.

        Raises:
            KeyError: There is no such replica.
        """
        self._replica_set.remove(name)

    def drain(self, name: str) -> None:
        """Give a replica nothing new until `resume`; what it has in flight continues.

        Its trajectories are placed again at their next turn. It is empty when its `in_flight` is 0.

        Raises:
            KeyError: There is no such replica.
        """
        replica = self._replica_set.get(name)
        replica.is_draining = True
        self._replica_set.refresh(replica)

    def resume(self, name: str) -> None:
        """End `drain`; raises as that does."""
        replica = self._replica_set.get(name)
        replica.is_draining = False
        self._replica_set.refresh(replica)

    def require_weights(self, version: int | None) -> None:
        """From now on only replicas with this version of the weights get work; None: all do."""
        self._weight_version = version
        for replica in self._replica_set.offered:
            self._check_weights(replica, replica.weight_version)

    def set_weights(self, name: str, version: int) -> None:
        """A replica has other weights now; what its cache holds is of no more use.

        Raises:
            KeyError: There is no such replica.
        """
        replica = self._replica_set.get(name)
        if version != replica.weight_version:
            replica.cache_epoch += 1
        self._check_weights(replica, version)

    def _check_weights(self, replica: ReplicaState, version: int) -> None:
        replica.weight_version = version
        replica.is_stale = self._weight_version not in (None, version)
        self._replica_set.refresh(replica)

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
        replicas, sessions = self._replica_set, self._sessions
        dispatch = Dispatch(session_id, prompt_tokens, replicas.expect_tokens(max_new_tokens))
        sessions.recall(dispatch, group_id)
        replica = self._choose(dispatch, None if avoid is None else replicas.find(avoid))
        if replica is None:
            self._refusals += 1
            return None
        dispatch.replica, dispatch.fresh_tokens = replica, prompt_tokens
        if replica is dispatch.pinned:
            dispatch.fresh_tokens -= dispatch.warm_tokens
        elif replica in dispatch.holders:
            dispatch.fresh_tokens -= dispatch.shared_tokens
        self._moves += replica is not dispatch.pinned and dispatch.pinned is not None
        self._decisions += 1
        replicas.send(dispatch)
        sessions.note(dispatch, group_id)
        return dispatch

    def _choose(self, dispatch: Dispatch, avoid: ReplicaState | None) -> ReplicaState | None:
        if self._strategy == "round_robin":
            pinned = dispatch.pinned
            may_stay = pinned is not None and pinned.is_open and pinned is not avoid
            return pinned if may_stay else self._replica_set.choose_next(avoid)
        return self._replica_set.choose(dispatch, self._margin, avoid)

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
        self._replica_set.end(dispatch, generated)
        if generated is not None:
            self._sessions.grow(dispatch, generated)

    def report(self, name: str, load: EngineLoad, *, now: float | None = None) -> None:
        """Take in what a replica says of itself; a report of one that is not offered is ignored."""
        replica = self._replica_set.find(name)
        self._now = max(self._now, 0.0 if now is None else now)
        if replica is not None:
            self._replica_set.report(replica, load, self._now)

    def forget(self, session_id: str) -> None:
        """The trajectory has ended; nothing is kept for it."""
        self._sessions.forget(session_id)

    def statistics(self) -> RouterStatistics:
        """A snapshot of everything that decisions are made from."""
        known = self._replica_set
        replicas = tuple(
            ReplicaLoad(
                **{name: getattr(each, name) for name in SAME_FIELDS},
                load_s=known.load_s(each),
                speed=known.speed(each),
            )
            for each in known.counted
        )
        return RouterStatistics(
            strategy=self._strategy,
            decisions=self._decisions,
            moves=self._moves,
            refusals=self._refusals,
            in_flight=sum(each.in_flight for each in known.counted),
            sessions=len(self._sessions),
            groups=self._sessions.group_count,
            mean_new_tokens=known.mean_new_tokens,
            token_s=known.token_s,
            replicas=replicas,
        )
