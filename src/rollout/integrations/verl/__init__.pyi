# ruff: isort: skip_file
from rollout.integrations.verl.checkpoint_manager import CheckpointManager as CheckpointManager
from rollout.integrations.verl.interactions import VerlInteraction as VerlInteraction
from rollout.integrations.verl.interactions_config import (
    load_verl_interactions as load_verl_interactions,
)
from rollout.integrations.verl.manager import AgentLoopManager as AgentLoopManager
from rollout.integrations.verl.multi_turn import (
    VerlMultiTurn as VerlMultiTurn,
    load_verl_multi_turn as load_verl_multi_turn,
)
from rollout.integrations.verl.tools_config import load_verl_tools as load_verl_tools
