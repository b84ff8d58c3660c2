"""The router: one synchronous decision for each request, and the counts for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.engine.routing.dispatch import Dispatch
from rollout.engine.routing.replica_set import ReplicaSet
from rollout.engine.routing.sessions import Sessions
from rollout.engine.routing.statistics import RouterStatistics, load_of
from rollout.engine.routing.strategies import load_strategy
from rollout.errors import EngineError

if TYPE_CHECKING:
    from rollout.engine.core import EngineLoad
    from rollout.engine.routing.replica_state import ReplicaState

#: Replicas that `repr` names.
SHOWN = 8


class Router:
    """Which replica gets the next request; see ``docs/routing.md``.

    It owns no task and no clock: every method returns at once, and `now` is the caller's clock, in
    seconds that never go back. Left out, `now` is the last one given.

    Args:
        strategy: ``estimated_seconds``, ``least_requests``, ``round_robin``, ``consistent_hash``,
            or ``package.module:Class`` of a `Strategy`.
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
        self._strategy_name = strategy
        self._strategy = load_strategy(
            strategy, move_margin=move_margin, move_margin_s=move_margin_s
        )
        self._replica_set = ReplicaSet()
        self._sessions = Sessions()
        self._weight_version: int | None = None
        self._now = 0.0
        self._decisions = self._moves = self._refusals = 0

    def __repr__(self) -> str:
        replicas = self._replica_set.replicas
        shown = [
            f"{r.name} {r.in_flight}/{r.capacity} {self._replica_set.load_s(r):.1f} s"
            + ("" if r.state == "serving" else f" {r.state}")
            for r in replicas[:SHOWN]
        ]
        if len(replicas) > SHOWN:
            shown.append(f"and {len(replicas) - SHOWN} more")
        return f"<Router {self._strategy_name}: {', '.join(shown) or 'no replicas'}>"

    @property
    def replicas(self) -> tuple[ReplicaState, ...]:
        """The replicas that are offered, in the order in which they were added first."""
        return self._replica_set.replicas

    @property
    def has_room(self) -> bool:
        """Whether any replica may get a request now."""
        return self._replica_set.open_count > 0

    def add(
        self,
        name: str,
        capacity: int,
        *,
        weight: float = 1.0,
        weight_version: int = 0,
        now: float | None = None,
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
        replica = self._replica_set.add(name, capacity, weight, self._tick(now))
        self._sessions.cache_lost()
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
        """End `drain`.

        Raises:
            KeyError: There is no such replica.
        """
        replica = self._replica_set.get(name)
        replica.is_draining = False
        self._replica_set.refresh(replica)

    def isolate(self, name: str) -> None:
        """Give a replica nothing until `end_isolation`, beside what `drain` says."""
        self._set_isolated(name, is_isolated=True)

    def end_isolation(self, name: str) -> None:
        """End `isolate`; harmless where there is none."""
        self._set_isolated(name, is_isolated=False)

    def _set_isolated(self, name: str, *, is_isolated: bool) -> None:
        replica = self._replica_set.find(name)
        if replica is not None and replica.is_isolated is not is_isolated:
            replica.is_isolated = is_isolated
            self._replica_set.refresh(replica)

    def require_weights(self, version: int | None) -> None:
        """From now on only replicas with this version of the weights get work; None: all do."""
        self._weight_version = version
        for replica in self._replica_set.replicas:
            self._check_weights(replica, replica.weight_version)

    def set_weights(self, name: str, version: int) -> None:
        """A replica has other weights now; what its cache holds is of no more use.

        Raises:
            KeyError: There is no such replica.
        """
        replica = self._replica_set.get(name)
        if version != replica.weight_version:
            replica.cache_epoch += 1
            self._sessions.cache_lost()
        self._check_weights(replica, version)

    def assign(
        self,
        session_id: str,
        *,
        group_id: str = "",
        prompt_tokens: int = 0,
        max_new_tokens: int | None = None,
        avoid: str | None = None,
        now: float | None = None,
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
        replica_set, sessions = self._replica_set, self._sessions
        new_tokens = replica_set.expected_tokens(max_new_tokens)
        dispatch = Dispatch(session_id, prompt_tokens, new_tokens, prompt_tokens)
        sessions.recall(dispatch, group_id)
        if avoid is not None:
            dispatch.avoid = replica_set.find(avoid)
        replica = self._strategy.choose(dispatch, replica_set)
        if replica is None:
            self._refusals += 1
            return None
        if not replica.is_open:
            raise EngineError(
                f"router.strategy = {self._strategy_name!r} chose {replica.name}, which may get "
                f"nothing now ({replica.state})"
            )
        dispatch.replica = replica
        if replica is dispatch.pinned:
            dispatch.fresh_tokens = prompt_tokens - dispatch.warm_tokens
        else:
            self._moves += dispatch.pinned is not None
            if replica in dispatch.holders:
                dispatch.fresh_tokens = prompt_tokens - dispatch.shared_tokens
        self._decisions += 1
        replica_set.send(dispatch, self._tick(now))
        sessions.note(dispatch, group_id)
        return dispatch

    def release(
        self, dispatch: Dispatch, *, generated: int | None = None, now: float | None = None
    ) -> None:
        """A request is gone.

        Args:
            generated: Tokens that it generated; None where it was cut short, refused or lost,
                from which nothing is learned.

        Raises:
            ValueError: It was released before; nothing has changed.
        """
        if not dispatch.is_counted:
            raise ValueError(f"{dispatch!r} is not in flight")
        self._replica_set.end(dispatch, generated, self._tick(now))
        if generated is not None:
            self._sessions.grow(dispatch, generated)

    def report(self, name: str, load: EngineLoad, *, now: float | None = None) -> None:
        """Take in what a replica says of itself; one that is not offered is not listened to."""
        replica = self._replica_set.find(name)
        if replica is not None:
            self._replica_set.report(replica, load, self._tick(now))

    def forget(self, session_id: str) -> None:
        """The trajectory has ended; nothing is kept for it."""
        self._sessions.forget(session_id)

    def statistics(self) -> RouterStatistics:
        """A snapshot of everything that decisions are made from."""
        replica_set, costs = self._replica_set, self._replica_set.costs
        replicas = tuple(load_of(replica, replica_set) for replica in replica_set.counted)
        return RouterStatistics(
            strategy=self._strategy_name,
            decisions=self._decisions,
            moves=self._moves,
            refusals=self._refusals,
            in_flight=replica_set.in_flight,
            sessions=len(self._sessions),
            groups=self._sessions.group_count,
            mean_new_tokens=replica_set.mean_new_tokens,
            step_s=costs.step_s,
            token_s=costs.token_s,
            prompt_s=costs.prompt_s,
            replicas=replicas,
        )

    def _check_weights(self, replica: ReplicaState, version: int) -> None:
        replica.weight_version = version
        replica.is_stale = self._weight_version not in (None, version)
        self._replica_set.refresh(replica)

    def _tick(self, now: float | None) -> float:
        if now is not None and now > self._now:
            self._now = now
        return self._now
