"""Routing: which replica gets which request.

`Router` is the whole; its parts are pure and know nothing of each other's work: `cost_model` (what
an engine's time costs), `replica_state` and `replica_set` (what each has to do), `sessions` (who
holds which prefix), `strategies` (the decision).
"""

from __future__ import annotations

from rollout.engine.routing.dispatch import Dispatch
from rollout.engine.routing.replica_set import ReplicaSet
from rollout.engine.routing.replica_state import ReplicaState
from rollout.engine.routing.router import Router
from rollout.engine.routing.statistics import ReplicaLoad, RouterStatistics
from rollout.engine.routing.strategies import Strategy

__all__ = [
    "Dispatch",
    "ReplicaLoad",
    "ReplicaSet",
    "ReplicaState",
    "Router",
    "RouterStatistics",
    "Strategy",
]
