"""Interactions: simulated users who answer the model in its trajectories.

What reads verl's formats lives in `rollout.integrations.verl` and is found here on first use.
"""

from rollout.lazy import export_stub

export_stub(globals())
