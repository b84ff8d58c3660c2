"""Environments that people already have: objects with state, and OpenEnv servers."""

from __future__ import annotations

from rollout.environments.open_env import OpenEnv, OpenEnvError
from rollout.environments.tool_set import ToolSet

__all__ = ["OpenEnv", "OpenEnvError", "ToolSet"]
