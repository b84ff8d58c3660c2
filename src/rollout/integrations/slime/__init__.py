"""Runs agents of this library inside slime: `docs/trainers/slime.md`.

slime is imported when one of these names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.lazy import lazy_exports

if TYPE_CHECKING:
    from rollout.integrations.slime.functions import close, generate, generate_rollout

_HOMES = {"rollout.integrations.slime.functions": ("close", "generate", "generate_rollout")}
__all__ = ["close", "generate", "generate_rollout"]
__getattr__ = lazy_exports(globals(), _HOMES)
