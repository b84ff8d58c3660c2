"""Runs agents of this library inside OpenRLHF: `docs/trainers/openrlhf.md`.

OpenRLHF is imported when one of these names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.lazy import lazy_exports

if TYPE_CHECKING:
    from rollout.integrations.openrlhf.executor import RolloutExecutor, agent_executor

_HOMES = {"rollout.integrations.openrlhf.executor": ("RolloutExecutor", "agent_executor")}
__all__ = ["RolloutExecutor", "agent_executor"]
__getattr__ = lazy_exports(globals(), _HOMES)
