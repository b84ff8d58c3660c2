"""Admission, groups, deadlines and early stop: which trajectories run, and which are taken."""

from __future__ import annotations

from rollout.lazy import lazy_exports

__all__ = ["GroupPolicy", "has_signal"]
__getattr__ = lazy_exports(
    globals(),
    {"rollout.config": ("GroupPolicy",), "rollout.scheduling.selection": ("has_signal",)},
)
