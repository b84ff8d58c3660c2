"""Ends requests at their deadlines: one task for all of them.

A cancel scope around each wait would cost a tenth of all that a generation costs on the loop. A
request that ends in time, as nearly all do, costs nothing here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rollout.engine.driver.recovery import Attempt
    from rollout.engine.driver.replica import Replica
    from rollout.wake_budget import WakeBudget


class DeadlineWatch:
    """Looks at the requests of all attempts, whenever the first of their deadlines has come.

    It has the engine end a request that is overdue, which wakes who waits for it with the last
    answer; or without one, where it takes too long.

    Args:
        attempts: Those under way; the owner keeps them.
        replicas: Those that are asked, by name.
        wakes: What may be woken in a round of the loop.
        last_answer_s: How long the last answer may take.
    """

    def __init__(
        self,
        attempts: Collection[Attempt],
        replicas: Mapping[str, Replica],
        wakes: WakeBudget,
        last_answer_s: float,
    ) -> None:
        self._attempts = attempts
        self._replicas = replicas
        self._wakes = wakes
        self._last_answer_s = last_answer_s
        self._next = math.inf
        self._scope: anyio.CancelScope | None = None

    def look_at(self, time: float) -> None:
        """Look at all of them then, if not earlier."""
        if time < self._next:
            self._next = time
            if self._scope is not None:
                self._scope.deadline = time

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            with anyio.CancelScope(deadline=self._next) as self._scope:
                await anyio.sleep_forever()
            self._scope, self._next = None, math.inf
            for attempt in tuple(self._attempts):
                if self._wakes.is_spent:
                    await self._wakes.renewed()
                self._look(attempt)

    def _look(self, attempt: Attempt) -> None:
        pending = attempt.pending
        if pending is None or pending.done.is_set():
            return  # it has ended, or waits for a place
        now, due = anyio.current_time(), pending.given_up_at or attempt.deadline
        if now < due:
            self.look_at(due)
        elif pending.given_up_at is None:
            self._wakes.spend()
            channel = self._replicas[pending.part.replica].channel
            if channel is not None:
                channel.abandon_nowait(pending)
            pending.given_up_at = now + self._last_answer_s
            self.look_at(pending.given_up_at)
        else:
            pending.done.set()
