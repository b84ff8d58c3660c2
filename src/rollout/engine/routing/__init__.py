"""Routing: which replica gets which request."""

from rollout.engine.routing.records import Dispatch, ReplicaState, RouterStatistics
from rollout.engine.routing.router import STRATEGIES, Router

__all__ = ["STRATEGIES", "Dispatch", "ReplicaState", "Router", "RouterStatistics"]
