"""Operations on the replicas of a runtime while it works."""

from __future__ import annotations

import itertools
from types import MappingProxyType
from typing import TYPE_CHECKING

import anyio

from rollout.engine.weights import DiskWeights

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from rollout.runtime.runtime import RolloutRuntime

#: How long a replica is drained, and how long one that is removed may take to end its requests.
DRAINED_S = 0.5
#: Versions are new each time.
_versions = itertools.count(1000)


def _serving(runtime: RolloutRuntime) -> list[str]:
    return [r.name for r in runtime.engines.statistics() if r.state == "serving"]


async def _drain(runtime: RolloutRuntime) -> None:
    """Drain the first replica for a while."""
    for name in _serving(runtime)[:1]:
        runtime.engines.drain(name)
        try:
            await anyio.sleep(DRAINED_S)
        finally:
            runtime.engines.resume(name)


async def _add(runtime: RolloutRuntime) -> None:
    """Add a replica."""
    await runtime.engines.add_replica()


async def _remove(runtime: RolloutRuntime) -> None:
    """Remove the last replica, not the only one, with little patience."""
    for name in _serving(runtime)[1:][-1:]:
        await runtime.engines.remove_replica(name, drain_s=DRAINED_S)


async def _update(runtime: RolloutRuntime) -> None:
    """Load other weights."""
    await runtime.update_weights(version=next(_versions), source=DiskWeights("."))


OPERATIONS: Mapping[str, Callable[[RolloutRuntime], Awaitable[None]]] = MappingProxyType(
    {
        "replica_drain": _drain,
        "replica_add": _add,
        "replica_remove": _remove,
        "new_weights": _update,
    }
)
