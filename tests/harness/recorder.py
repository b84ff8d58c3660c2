"""Opens runtimes whose engines, tools, users and callers are watched from outside."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from harness.fault_injector import FaultInjector
from harness.invariants import anomalies_of
from harness.watched_engines import open_watched_engines
from harness.watched_runtime import WatchedRuntime
from harness.watched_tools import WatchedInteractions, WatchedTool
from rollout.config import InProcessPlacement
from rollout.errors import ConfigError
from rollout.runtime.opening import open_rollout_on
from rollout.scheduling.rewards.functions import GivenRewards
from rollout.scopes import open_task_group
from rollout.seeds import fresh_seed
from rollout.tools.function import FunctionTool
from rollout.tools.tool import Tool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from harness.call_records import CallRecord
    from harness.watched_core import WatchedCore
    from rollout.config import RolloutConfig
    from rollout.scheduling.rewards.signatures import GroupRewardFunction, RewardFunction


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

        Raises:
            ConfigError: The engines do not live on the driver's loop, where they can be watched, or
                rewards are called in processes.
        """
        if config.rewards.processes:
            raise ConfigError(
                f"rewards.processes = {config.rewards.processes}: expected 0, where a recorder can "
                "watch the rewards"
            )
        if not isinstance(config.placement, InProcessPlacement):
            raise ConfigError(
                f"placement.kind = {config.placement.kind!r}: expected 'in_process', where a "
                f"recorder can watch the engines"
            )
        if config.seed is None:  # what is checked is derived from it
            config = attrs.evolve(config, seed=fresh_seed())
        watched = WatchedRuntime(config)
        self.runtimes.append(watched)
        left: float | None = None
        try:
            async with open_rollout_on(
                partial(open_watched_engines, watched),
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
