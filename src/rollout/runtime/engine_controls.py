"""What a runtime offers to a trainer that shares GPUs and weights with its engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.engine.wire.operations import ALL_TAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rollout.agents.services import Services
    from rollout.engine.driver.pool import EnginePool
    from rollout.engine.weights import UpdateMode, WeightSource
    from rollout.runtime.group_calls import GroupCalls
    from rollout.scheduling.journal.journal import Journal


class EngineControls:
    """The part of a `RolloutRuntime` that changes its engines."""

    services: Services
    _groups: GroupCalls
    _journal: Journal | None
    _refuse_when_closed: Callable[[], None]

    @property
    def engines(self) -> EnginePool:
        """The engines: replicas can be added, removed and drained there while calls run."""
        return self.services.engines

    async def update_weights(
        self, *, version: int, source: WeightSource, mode: UpdateMode = "abort_and_resume"
    ) -> None:
        """Every engine has these weights afterwards; see `EnginePool.update_weights`.

        Args:
            version: What tokens sampled with them are stamped with, in `weight_versions`.
            mode: What becomes of generations under way: "wait", "abort_and_resume" or "in_place".

        Raises:
            EngineError: An argument is wrong, or no engine could load them; all keep the weights
                that they have.
            RolloutError: The runtime is closed.
        """
        self._refuse_when_closed()
        await self.engines.update_weights(version, source, mode)
        self._groups.weights_changed()
        if self._journal is not None:
            self._journal.note_version(int(version))

    async def sleep(self, level: int = 1) -> None:
        """The engines have released memory afterwards; see `EnginePool.sleep`.

        Trajectories stay as they are; those that generate wait until `wake_up`.

        Args:
            level: 1 releases the KV cache, 2 the weights as well.
        """
        await self.engines.sleep(level)

    async def wake_up(self, tags: Iterable[str] = ALL_TAGS) -> None:
        """The engines have taken memory back afterwards; see `EnginePool.wake_up`.

        Args:
            tags: "weights", "kv_cache", or both.
        """
        await self.engines.wake_up(tags)

    async def flush_cache(self) -> None:
        """The engines have forgotten what they computed so far; see `EnginePool.flush_cache`."""
        await self.engines.flush_cache()
