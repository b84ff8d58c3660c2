"""The calls of a runtime: which step each is, and when the engines sleep."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from typing import TYPE_CHECKING

import anyio

from rollout.errors import EngineError, RolloutError
from rollout.scheduling.calls import CLOSED_MEANWHILE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from rollout.chat.trajectory import Group, Trajectory
    from rollout.engine.pool.pool import EnginePool


logger = logging.getLogger("rollout")

#: How deep engines sleep: a trainer needs all of the memory, and gives new weights as a rule.
LEVEL = 2


class StepCount:
    """Numbers the calls that name no step."""

    def __init__(self) -> None:
        self._next = 0

    @contextmanager
    def counted(self, step: int | None) -> Iterator[int]:
        """The step of a call: its number, where it has none; one that is refused does not count."""
        number = self._next
        self._next += step is None
        try:
            yield number if step is None else step
        except RolloutError:
            if step is None and self._next == number + 1:
                self._next = number
            raise


class SleepBetweenBatches:
    """Wakes the engines for the first batch, and puts them to sleep after the last that runs.

    Attributes:
        is_over: Whether they are being closed, and need not be put to sleep any more.
    """

    def __init__(self, engines: EnginePool, *, is_wanted: bool) -> None:
        self.is_over = False
        self._engines, self._is_wanted = engines, is_wanted
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
                try:
                    with anyio.CancelScope(shield=True):  # the pool limits each replica
                        await self._engines.sleep(LEVEL)
                except EngineError as error:  # the batch is not lost because of that
                    logger.warning("the engines stay awake: %s", error)


def number_rows(groups: Sequence[Group]) -> list[Trajectory]:
    """The trajectories of a batch of these groups, numbered by their places in it.

    They are the batch's own: a group may stand in other batches too, at other places.
    """
    rows = []
    for place, group in enumerate(groups):
        for trajectory in map(copy, group.trajectories):
            trajectory.group = place
            rows.append(trajectory)
    return rows
