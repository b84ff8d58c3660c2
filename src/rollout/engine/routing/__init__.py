"""Routing: which replica gets which request.

`Router` is the whole. Its parts own no task and no clock: `replicas` (what each replica has in
flight, and how fast it is) and `sessions` (which replica has which prefix in its cache).
"""

from __future__ import annotations

from rollout.engine.routing.replicas import Dispatch, ReplicaState
from rollout.engine.routing.router import STRATEGIES, Router
from rollout.engine.routing.statistics import ReplicaLoad, RouterStatistics

__all__ = ["STRATEGIES", "Dispatch", "ReplicaLoad", "ReplicaState", "Router", "RouterStatistics"]
