"""The one owner of a runtime's task groups, and how it is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.lazy import lazy_exports

if TYPE_CHECKING:
    from rollout.runtime.blocking import BlockingRollout, open_rollout_blocking
    from rollout.runtime.measuring import RuntimeStatistics
    from rollout.runtime.opening import open_rollout
    from rollout.runtime.runtime import RolloutRuntime

_HOMES = {
    "rollout.runtime.blocking": ("BlockingRollout", "open_rollout_blocking"),
    "rollout.runtime.opening": ("open_rollout",),
    "rollout.runtime.runtime": ("RolloutRuntime",),
    "rollout.runtime.measuring": ("RuntimeStatistics",),
}
__all__ = [
    "BlockingRollout",
    "RolloutRuntime",
    "RuntimeStatistics",
    "open_rollout",
    "open_rollout_blocking",
]
__getattr__ = lazy_exports(globals(), _HOMES)
