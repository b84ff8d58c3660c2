"""Admission, groups, deadlines and early stop: which trajectories run, and which are taken."""

from rollout.lazy import export_stub

export_stub(globals())
