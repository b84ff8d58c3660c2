"""TRL's `GRPOTrainer` on our runtime: ``GRPOTrainer(rollout_func=rollout_func(config), …)``.

Imports TRL nowhere: the trainer is given.
"""

from rollout.integrations.trl.rollout_func import TrlRollout, rollout_func
from rollout.integrations.trl.trainer_rewards import rollout_reward

__all__ = ["TrlRollout", "rollout_func", "rollout_reward"]
