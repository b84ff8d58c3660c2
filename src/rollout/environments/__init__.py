"""Environments that people already have: objects with state, OpenEnv servers, task directories."""

from rollout.environments.open_env import OpenEnv, OpenEnvError
from rollout.environments.task_directory import TaskDirectory
from rollout.environments.tool_set import ToolSet

__all__ = ["OpenEnv", "OpenEnvError", "TaskDirectory", "ToolSet"]
