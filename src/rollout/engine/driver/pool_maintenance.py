"""What changes all replicas of a pool: their weights and their memory, one change at a time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rollout.engine.channel.operations import ALL_TAGS, TAGS_OF_LEVEL
from rollout.engine.driver.engine_events import telling_memory, telling_weights
from rollout.engine.driver.weight_updater import check_update

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollout.engine.driver.maintenance_queue import MaintenanceQueue
    from rollout.engine.driver.memory_manager import MemoryManager
    from rollout.engine.driver.weight_updater import WeightUpdater
    from rollout.engine.weights import UpdateMode, WeightSource
    from rollout.observe.event_stream import EventStream


class PoolMaintenance:
    """The part of an `EnginePool` that changes its engines."""

    events: EventStream
    _maintenance: MaintenanceQueue
    _memory_manager: MemoryManager
    _weight_updater: WeightUpdater

    async def update_weights(
        self, version: int, source: WeightSource, mode: UpdateMode = "abort_and_resume"
    ) -> None:
        """Every replica has these weights afterwards; one that starts later gets them first.

        Replicas load them side by side, and get new requests when they have. One that cannot load
        them is restarted, unless none can. Cancellation leaves them to it.

        Args:
            version: What the tokens sampled with them are stamped with.
            mode: What becomes of the requests that a replica has in flight. "wait": they end
                first. "abort_and_resume": they are cut off, keep their tokens, and resume from
                those under the new weights. "in_place": they continue, with what was computed of
                them under the old weights.

        Raises:
            EngineError: An argument is wrong, or no replica could load them: the error of each.
                All have the weights that they had, those that broke once they have restarted.
        """
        version = check_update(version, source, mode)
        with telling_weights(self.events, version, mode):
            await self._maintenance.do(partial(self._weight_updater.update, version, source, mode))

    async def sleep(self, level: int = 1) -> None:
        """Every replica has released memory afterwards; returns once it is free.

        Running requests are cut off and keep their tokens; they, and those that come, wait and go
        on after `wake_up`. Replicas that start meanwhile sleep too.

        Args:
            level: 1 releases the KV cache, 2 the weights as well.

        Raises:
            EngineError: An engine could not; all stay awake.
        """
        with telling_memory(self.events, "sleep", TAGS_OF_LEVEL.get(level, ())):
            await self._maintenance.do(partial(self._memory_manager.sleep, level))

    async def wake_up(self, tags: Iterable[str] = ALL_TAGS) -> None:
        """Take back what `sleep` released; requests resume once all of it is there.

        Weights are those that were current, or were loaded while the engines slept.

        Args:
            tags: "weights", "kv_cache", or both.

        Raises:
            EngineError: An engine could not; it is restarted.
        """
        tags = tuple(tags)
        with telling_memory(self.events, "wake_up", tags):
            await self._maintenance.do(partial(self._memory_manager.wake_up, tags))

    async def flush_cache(self) -> None:
        """Every replica forgets what it computed of earlier requests, once none runs there.

        Raises:
            EngineError: An engine could not.
        """
        await self._maintenance.do(self._memory_manager.flush_cache)
