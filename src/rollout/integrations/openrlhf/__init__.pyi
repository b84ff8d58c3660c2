# ruff: isort: skip_file
from rollout.integrations.openrlhf.executor import (
    RolloutExecutor as RolloutExecutor,
    agent_executor as agent_executor,
)
