"""Interactions: simulated users who answer the model in its trajectories."""

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
from rollout.interactions.verl import VerlInteraction
from rollout.interactions.verl_config import load_verl_interactions

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
