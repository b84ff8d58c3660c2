"""Interactions: simulated users who answer the model in its trajectories.

What reads verl's formats lives in `rollout.integrations.verl` and is found here on first use.
"""

from __future__ import annotations

from rollout.interactions.interaction import (
    Interaction,
    InteractionContext,
    InteractionFactory,
    InteractionRegistry,
    InteractionTurn,
)
from rollout.interactions.model_user import ModelUser
from rollout.interactions.scripted import ScriptedUser
from rollout.interactions.verifier import Verifier
from rollout.lazy import lazy_exports

__all__ = [
    "Interaction",
    "InteractionContext",
    "InteractionFactory",
    "InteractionRegistry",
    "InteractionTurn",
    "ModelUser",
    "ScriptedUser",
    "Verifier",
    "VerlInteraction",
    "load_verl_interactions",
]
__getattr__ = lazy_exports(
    globals(), {"rollout.integrations.verl": ("VerlInteraction", "load_verl_interactions")}
)
