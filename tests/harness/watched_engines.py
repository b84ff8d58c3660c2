"""The engines of a runtime, recorded: what is asked of them, and what came of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import anyio

from harness.call_records import GenerationRecord, name_of
from harness.watched_core import WatchedCore
from rollout.engine.driver.engine_opening import open_engines
from rollout.engine.placement.in_process import InProcess
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from harness.watched_runtime import WatchedRuntime
    from rollout.config import RolloutConfig
    from rollout.engine.core import EngineCore, SamplingParams
    from rollout.engine.driver.generation import Generation
    from rollout.engine.driver.pool import EnginePool
    from rollout.engine.driver.replica_supervisor import FactsGiver
    from rollout.observe.event_stream import EventStream
    from rollout.token_prefix import TokenPrefix


class WatchedEngines:
    """An `EnginePool` with records; everything that is not here is the pool's own."""

    def __init__(self, pool: EnginePool, watched: WatchedRuntime) -> None:
        self._pool = pool
        self._watched = watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def generate(
        self,
        generation: Generation,
        *,
        session_id: str,
        prompt_ids: bytes | TokenPrefix,
        sampling: SamplingParams,
        **options: Any,
    ) -> None:
        """See `EnginePool.generate`."""
        packed = prompt_ids if isinstance(prompt_ids, bytes) else prompt_ids.packed()
        record = GenerationRecord(generation, packed, sampling, anyio.current_time())
        self._watched.record_generation(session_id, record)
        try:
            await self._pool.generate(
                generation,
                session_id=session_id,
                prompt_ids=prompt_ids,
                sampling=sampling,
                **options,
            )
        except BaseException as error:
            record.failure = name_of(error)
            record.is_engine_failure = isinstance(error, EngineError)
            raise
        finally:
            record.ended = anyio.current_time()

    def forget(self, session_id: str) -> None:
        """See `EnginePool.forget`."""
        self._watched.forgotten.add(session_id)
        self._pool.forget(session_id)


@asynccontextmanager
async def open_watched_engines(
    watched: WatchedRuntime, config: RolloutConfig, facts: FactsGiver, events: EventStream
) -> AsyncIterator[EnginePool]:
    """The engines of a configuration on the driver's own loop, each core a watched one."""

    def watch(name: str, core: EngineCore) -> EngineCore:
        core = WatchedCore(name, core)
        watched.cores.append(core)
        return core

    async with open_engines(config, facts, events, placement=InProcess(wrap=watch)) as pool:
        yield cast("EnginePool", WatchedEngines(pool, watched))
