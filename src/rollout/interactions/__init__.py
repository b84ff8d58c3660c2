"""Interactions: simulated users who answer the model in its trajectories."""

from rollout.interactions.interaction import (
    Interaction,
    InteractionContext,
    InteractionFactory,
    InteractionRegistry,
    InteractionTurn,
)
from rollout.interactions.scripted import ScriptedUser

__all__ = [
    "Interaction",
    "InteractionContext",
    "InteractionFactory",
    "InteractionRegistry",
    "InteractionTurn",
    "ScriptedUser",
]
