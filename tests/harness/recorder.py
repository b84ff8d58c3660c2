"""Opens runtimes whose engines, tools, users and callers are watched from outside."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import anyio
import attrs

from harness.call_records import GenerationRecord, name_of
from harness.invariants import anomalies_of
from harness.watched_core import WatchedCore
from harness.watched_runtime import WatchedRuntime
from harness.watched_tools import FaultInjector, WatchedInteractions, WatchedTool
from rollout.config import InProcessPlacement
from rollout.engine.placement.in_process import InProcess
from rollout.engine.pool.opening import open_engines
from rollout.errors import EngineError
from rollout.runtime.opening import open_rollout_on
from rollout.scheduling.rewards.functions import GivenRewards
from rollout.scopes import open_task_group
from rollout.seeds import fresh_seed
from rollout.tools.function_tools import FunctionTool
from rollout.tools.tool import Tool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from harness.call_records import CallRecord
    from rollout.config import RolloutConfig
    from rollout.engine.core import EngineCore
    from rollout.engine.pool.generation import Generation
    from rollout.engine.pool.pool import EnginePool, ExpectationsGiver
    from rollout.observe.event_stream import EventStream
    from rollout.scheduling.rewards.functions import GroupRewardFunction, RewardFunction


class Recorder:
    """Opens runtimes and records what happens, for `anomalies` to compare with what they report.

    Args:
        closes_at_once: Close runtimes when their block is left. Otherwise the recorder first
            waits until they are quiet, so that the accounts must balance to the token.

    Attributes:
        runtimes: Those opened so far.
        fault_injector: Lets the next tool call or answer of a simulated user fail.
    """

    def __init__(self, *, closes_at_once: bool = False) -> None:
        self.runtimes: list[WatchedRuntime] = []
        self.fault_injector = FaultInjector()
        self._closes_at_once = closes_at_once

    @asynccontextmanager
    async def open_rollout(
        self,
        config: RolloutConfig,
        tools: Sequence[Any] = (),
        reward: RewardFunction | None = None,
        interactions: Sequence[Any] = (),
        *,
        group_reward: GroupRewardFunction | None = None,
    ) -> AsyncIterator[WatchedRuntime]:
        """`rollout.open_rollout`, watched; the arguments are the same.

        Engines live on the driver's loop and rewards are called there, where they can be watched.
        """
        assert isinstance(config.placement, InProcessPlacement), config.placement
        assert not config.rewards.processes
        if config.seed is None:  # what is checked is derived from it
            config = attrs.evolve(config, seed=fresh_seed())
        watched = WatchedRuntime(config)
        self.runtimes.append(watched)
        left: float | None = None
        try:
            async with open_rollout_on(
                partial(_open_watched_engines, watched),
                config,
                [self._tool(tool, watched) for tool in tools],
                GivenRewards(
                    watched.watch_reward(reward), watched.watch_group_reward(group_reward)
                ),
                [
                    WatchedInteractions(each, watched.record_use, self.fault_injector)
                    for each in interactions
                ],
            ) as runtime:
                watched.attach(runtime)
                try:
                    async with open_task_group() as tasks:
                        tasks.start_soon(watched.operate)
                        yield watched
                finally:
                    if not self._closes_at_once:
                        await watched.settle()
                    left = anyio.current_time()
        finally:
            if left is not None:
                watched.closed(anyio.current_time() - left)

    def calls_under_way(self) -> list[CallRecord]:
        """Calls of any runtime that have not ended."""
        return [call for each in self.runtimes for call in each.calls if call.ended is None]

    def engines_alive(self) -> list[WatchedCore]:
        """Engines of any runtime that start or serve."""
        return [core for each in self.runtimes for core in each.cores if not core.is_gone]

    def anomalies(self) -> list[str]:
        """What in the records contradicts an invariant, in words; empty if all is well."""
        return [text for watched in self.runtimes for text in anomalies_of(watched)]

    def _tool(self, tool: Any, watched: WatchedRuntime) -> Tool:
        real = tool if isinstance(tool, Tool) else FunctionTool(tool)
        return WatchedTool(real, watched.record_use, self.fault_injector)


class _WatchedEngines:
    """An `EnginePool` with records; everything that is not here is the pool's own."""

    def __init__(self, pool: EnginePool, watched: WatchedRuntime) -> None:
        self._pool = pool
        self._watched = watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def generate(self, generation: Generation) -> None:
        """See `EnginePool.generate`."""
        prompt, sampling = generation.prompt, generation.sampling
        packed = prompt if isinstance(prompt, bytes) else prompt.packed()
        record = GenerationRecord(generation, packed, sampling, anyio.current_time())
        self._watched.record_generation(generation.session_id, record)
        try:
            await self._pool.generate(generation)
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
async def _open_watched_engines(
    watched: WatchedRuntime, config: RolloutConfig, facts: ExpectationsGiver, events: EventStream
) -> AsyncIterator[EnginePool]:
    """The engines of a configuration on the driver's own loop, each core a watched one."""

    def watch(name: str, core: EngineCore) -> EngineCore:
        watched.cores.append(WatchedCore(name, core))
        return cast("EngineCore", watched.cores[-1])

    async with open_engines(config, facts, events, placement=InProcess(wrap=watch)) as pool:
        yield cast("EnginePool", _WatchedEngines(pool, watched))
