"""Strategies: which of the replicas gets a request."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol

from rollout.engine.routing.hashing import HashRing
from rollout.engine.routing.replica_set import REQUESTS, ROUNDS
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from rollout.engine.routing.dispatch import Dispatch
    from rollout.engine.routing.replica_set import ReplicaSet
    from rollout.engine.routing.replica_state import ReplicaState

STRATEGIES = ("estimated_seconds", "least_requests", "round_robin", "consistent_hash")
STRATEGIES_TEXT = (
    f"one of {', '.join(map(repr, STRATEGIES))}, or a string like 'package.module:Class'"
)


class Strategy(Protocol):
    """One decision; a class of yours is constructed without arguments."""

    def choose(self, dispatch: Dispatch, replica_set: ReplicaSet) -> ReplicaState | None:
        """One of ``replica_set.candidates(dispatch)``; None if there is none.

        Called once for every request, with no await between it and the count of the request; it
        must not change what it is given.
        """


class EstimatedSeconds:
    """Where the request should be done soonest; a pinned one moves for more than a margin."""

    def __init__(self, move_margin_s: float) -> None:
        self._move_margin_s = move_margin_s

    def choose(self, dispatch: Dispatch, replica_set: ReplicaSet) -> ReplicaState | None:
        """See `Strategy`."""
        seconds = replica_set.estimate(dispatch)
        best, pinned = replica_set.fastest(), dispatch.pinned
        if pinned is None or best is None or pinned is best:
            return best
        is_worth_it = seconds[pinned.slot] > seconds[best.slot] + self._move_margin_s
        return best if is_worth_it else pinned


class LeastRequests:
    """Fewest requests in flight; a pinned one moves past a margin of requests."""

    def __init__(self, move_margin: int) -> None:
        self._move_margin = move_margin

    def choose(self, dispatch: Dispatch, replica_set: ReplicaSet) -> ReplicaState | None:
        """See `Strategy`."""
        least, pinned = replica_set.least(REQUESTS, dispatch), dispatch.pinned
        if least is None or not _may_stay(dispatch):
            return least
        assert pinned is not None
        most = least.in_flight / least.weight + self._move_margin
        return least if pinned.in_flight / pinned.weight > most else pinned


class RoundRobin:
    """New trajectories in turn; later turns stay."""

    def choose(self, dispatch: Dispatch, replica_set: ReplicaSet) -> ReplicaState | None:
        """See `Strategy`."""
        return dispatch.pinned if _may_stay(dispatch) else replica_set.least(ROUNDS, dispatch)


class ConsistentHash:
    """By a stable hash of the trajectory's id, whatever the load; the next one where it cannot."""

    def __init__(self) -> None:
        self._replicas: tuple[ReplicaState, ...] = ()
        self._ring = HashRing(())

    def choose(self, dispatch: Dispatch, replica_set: ReplicaSet) -> ReplicaState | None:
        """See `Strategy`."""
        if self._replicas is not replica_set.replicas:
            self._replicas = replica_set.replicas
            self._ring = HashRing(replica_set.replicas)
        if replica_set.open_count == 0:
            return None
        return self._ring.find(dispatch.session_id, lambda r: r.is_open and r is not dispatch.avoid)


def _may_stay(dispatch: Dispatch) -> bool:
    pinned = dispatch.pinned
    return pinned is not None and pinned.is_open and pinned is not dispatch.avoid


def load_strategy(name: str, *, move_margin: int, move_margin_s: float) -> Strategy:
    """The strategy of this name, or an object of the class ``package.module:Class``.

    Raises:
        ConfigError: There is no such strategy, or no such class, or it is none.
    """
    match name:
        case "estimated_seconds":
            return EstimatedSeconds(move_margin_s)
        case "least_requests":
            return LeastRequests(move_margin)
        case "round_robin":
            return RoundRobin()
        case "consistent_hash":
            return ConsistentHash()
    return _custom_strategy(name)


def _custom_strategy(path: str) -> Strategy:
    module_name, colon, class_name = path.partition(":")
    if not (module_name and colon and class_name):
        raise _fault(path, f"expected {STRATEGIES_TEXT}")
    try:
        cls = getattr(importlib.import_module(module_name), class_name, None)
        if cls is None:
            raise _fault(path, f"module {module_name!r} has no class {class_name!r}")
        strategy: Strategy = cls()
    except ConfigError:
        raise
    except Exception as error:
        raise _fault(path, f"{type(error).__name__}: {error}") from error
    if not callable(getattr(strategy, "choose", None)):
        raise _fault(path, f"{class_name} has no method 'choose'")
    return strategy


def _fault(name: str, problem: str) -> ConfigError:
    fault = f"router.strategy = {name!r}: {problem}"
    return ConfigError(fault, (fault,))
