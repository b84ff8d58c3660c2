"""Engines: what generates tokens, where it lives, and the channel to it.

Names are imported on first use: an engine process imports submodules of this package in an
environment that may hold little else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.lazy import lazy_exports

if TYPE_CHECKING:
    from rollout.engine.channel.channel import connect_channel
    from rollout.engine.channel.server import EngineServer
    from rollout.engine.core import (
        Capabilities,
        Chunk,
        EngineCore,
        EngineInfo,
        EngineLoad,
        GenerationRequest,
        SamplingParams,
    )
    from rollout.engine.cores.base import BaseCore
    from rollout.engine.placement.ray_cluster import gpu_slots_of
    from rollout.engine.pool.opening import open_engines
    from rollout.engine.routing import Router
    from rollout.engine.weights import DiskWeights, DistributedWeights, TensorWeights

_HOMES = {
    "rollout.engine.channel.channel": ("connect_channel",),
    "rollout.engine.cores.base": ("BaseCore",),
    "rollout.engine.core": (
        "Capabilities",
        "Chunk",
        "EngineCore",
        "EngineInfo",
        "EngineLoad",
        "GenerationRequest",
        "SamplingParams",
    ),
    "rollout.engine.pool.opening": ("open_engines",),
    "rollout.engine.placement.ray_cluster": ("gpu_slots_of",),
    "rollout.engine.routing": ("Router",),
    "rollout.engine.channel.server": ("EngineServer",),
    "rollout.engine.weights": ("DiskWeights", "DistributedWeights", "TensorWeights"),
}
__all__ = [
    "BaseCore",
    "Capabilities",
    "Chunk",
    "DiskWeights",
    "DistributedWeights",
    "EngineCore",
    "EngineInfo",
    "EngineLoad",
    "EngineServer",
    "GenerationRequest",
    "Router",
    "SamplingParams",
    "TensorWeights",
    "connect_channel",
    "gpu_slots_of",
    "open_engines",
]
__getattr__ = lazy_exports(globals(), _HOMES)
