"""Agents of verifiers, trained by this library's engines: `docs/trainers/verifiers.md`.

verifiers and prime-rl are imported when what needs them is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.lazy import lazy_exports

if TYPE_CHECKING:
    from rollout.integrations.verifiers.client import RolloutClient, RolloutClientConfig, install
    from rollout.integrations.verifiers.door import Door, open_door
    from rollout.integrations.verifiers.samples import training_samples

_HOMES = {
    "rollout.integrations.verifiers.client": ("RolloutClient", "RolloutClientConfig", "install"),
    "rollout.integrations.verifiers.door": ("Door", "open_door"),
    "rollout.integrations.verifiers.samples": ("training_samples",),
}
__all__ = [
    "Door",
    "RolloutClient",
    "RolloutClientConfig",
    "install",
    "open_door",
    "training_samples",
]
__getattr__ = lazy_exports(globals(), _HOMES)
