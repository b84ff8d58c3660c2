"""What a driver has an engine do beside generating: weights and memory.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

from typing import Any

import msgspec
from anyio import to_thread

from rollout.engine.weights import DiskWeights, DistributedWeights
from rollout.errors import EngineError

#: What the levels of sleep release.
TAGS_OF_LEVEL = {1: ("kv_cache",), 2: ("kv_cache", "weights")}
ALL_TAGS = TAGS_OF_LEVEL[2]


class LoadWeights(msgspec.Struct, frozen=True, array_like=True, tag="load_weights"):
    """Load other weights; what is sampled from then on has this version."""

    version: int
    source: DiskWeights | DistributedWeights


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    """Release memory; see `SleepingCore.sleep`."""

    level: int


class WakeUp(msgspec.Struct, frozen=True, array_like=True, tag="wake_up"):
    """Take memory back; see `SleepingCore.wake_up`."""

    tags: tuple[str, ...]


class FlushCache(msgspec.Struct, frozen=True, array_like=True, tag="flush_cache"):
    """Forget what was computed of earlier requests."""


Operation = LoadWeights | Sleep | WakeUp | FlushCache


async def carry_out(core: Any, operation: Operation) -> None:
    """Have `core` do it.

    Raises:
        EngineError: It cannot; or whatever it raises.
    """
    match operation:
        case LoadWeights(version, source):
            load = _method(core, "update_weights", "change its weights")
            await _load(load, version, source)
        case Sleep(level):
            await _method(core, "sleep", "release its memory")(level)
        case WakeUp(tags):
            await _method(core, "wake_up", "release its memory")(tags)
        case FlushCache():
            await _method(core, "flush_cache", "flush its cache")()


async def _load(load: Any, version: int, source: DiskWeights | DistributedWeights) -> None:
    if isinstance(source, DiskWeights):
        await load(version, source)
        return
    from rollout.engine.broadcasting import receive_weights  # torch
    from rollout.engine.staging import unstage

    path = await to_thread.run_sync(receive_weights, source, abandon_on_cancel=True)
    try:
        await load(version, DiskWeights(path))
    finally:
        unstage(path)


def _method(core: Any, name: str, ability: str) -> Any:
    method = getattr(core, name, None)
    if method is None:
        raise EngineError(f"{type(core).__name__} cannot {ability}")
    return method
