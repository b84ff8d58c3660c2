"""verl's formats: its tools, its interactions and its YAML files."""

from rollout.integrations.verl.interactions import VerlInteraction
from rollout.integrations.verl.interactions_config import load_verl_interactions
from rollout.integrations.verl.multi_turn import VerlMultiTurn, load_verl_multi_turn
from rollout.integrations.verl.tools_config import load_verl_tools

__all__ = [
    "VerlInteraction",
    "VerlMultiTurn",
    "load_verl_interactions",
    "load_verl_multi_turn",
    "load_verl_tools",
]
