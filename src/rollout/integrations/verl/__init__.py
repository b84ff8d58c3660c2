"""verl: its rollout on this library, and its formats: tools, interactions, YAML files.

`AgentLoopManager` and `CheckpointManager` import verl when they are asked for; the readers of its
files do not.
"""

from typing import TYPE_CHECKING

from rollout.integrations.verl.interactions import VerlInteraction
from rollout.integrations.verl.interactions_config import load_verl_interactions
from rollout.integrations.verl.multi_turn import VerlMultiTurn, load_verl_multi_turn
from rollout.integrations.verl.tools_config import load_verl_tools
from rollout.lazy import lazy_exports

if TYPE_CHECKING:
    from rollout.integrations.verl.checkpoint_manager import CheckpointManager
    from rollout.integrations.verl.manager import AgentLoopManager

__all__ = [
    "AgentLoopManager",
    "CheckpointManager",
    "VerlInteraction",
    "VerlMultiTurn",
    "load_verl_interactions",
    "load_verl_multi_turn",
    "load_verl_tools",
]
__getattr__ = lazy_exports(
    globals(),
    {
        "rollout.integrations.verl.checkpoint_manager": ("CheckpointManager",),
        "rollout.integrations.verl.manager": ("AgentLoopManager",),
    },
)
