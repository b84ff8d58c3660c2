"""Runs agents of this library inside SkyRL: `docs/trainers/skyrl.md`.

SkyRL is imported when one of these names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.lazy import lazy_exports

if TYPE_CHECKING:
    from rollout.integrations.skyrl.entrypoint import RolloutExp, main
    from rollout.integrations.skyrl.generator import RolloutGenerator

_HOMES = {
    "rollout.integrations.skyrl.entrypoint": ("RolloutExp", "main"),
    "rollout.integrations.skyrl.generator": ("RolloutGenerator",),
}
__all__ = ["RolloutExp", "RolloutGenerator", "main"]
__getattr__ = lazy_exports(globals(), _HOMES)
