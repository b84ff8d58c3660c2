"""Engines that release their memory whenever no batch runs, as `engine.sleep_between_batches`."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from rollout.errors import EngineError, RolloutError
from rollout.scheduling.member_runs import CLOSED_MEANWHILE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.engine.driver.pool import EnginePool

#: Between batches a trainer needs all of the memory, and gives new weights as a rule.
LEVEL = 2

logger = logging.getLogger("rollout")


class SleepBetweenBatches:
    """Wakes the engines for the first batch, and puts them to sleep after the last that runs.

    Attributes:
        is_over: Whether they are being closed, and need not be put to sleep any more.
    """

    def __init__(self, engines: EnginePool, *, is_wanted: bool) -> None:
        self.is_over = False
        self._engines = engines
        self._is_wanted = is_wanted
        self._batches = 0

    async def begin(self) -> None:
        """Put them to sleep until there is a batch."""
        if self._is_wanted:
            await self._engines.sleep(LEVEL)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """They are awake for a batch.

        Raises:
            RolloutError: The runtime was closed meanwhile.
        """
        if not self._is_wanted:
            yield
            return
        self._batches += 1
        try:
            await self._engines.wake_up()
            if self.is_over:
                raise RolloutError(CLOSED_MEANWHILE)
            yield
        finally:
            self._batches -= 1
            if not self._batches and not self.is_over:
                with anyio.CancelScope(shield=True):  # bounded: the pool limits each replica
                    await self._put_to_sleep()

    async def _put_to_sleep(self) -> None:
        """A batch that is done is not lost because engines do not fall asleep after it."""
        try:
            await self._engines.sleep(LEVEL)
        except EngineError as error:
            logger.warning("the engines stay awake: %s", error)
