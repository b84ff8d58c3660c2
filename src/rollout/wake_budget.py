"""Spreads the waking of many tasks over rounds of the event loop."""

from __future__ import annotations

from collections import deque

import anyio

from rollout.bridge import loop_clock
from rollout.clocks import thread_cpu
from rollout.worker_threads import may_leave_loop

#: How long a round of the loop should take: the longest that a timer, a heartbeat or another
#: trajectory waits for those that were woken together.
ROUND_S = 0.005
#: Wake-ups of the first round, when nothing is known of their cost, and of any round.
FIRST_WAKES, MOST_WAKES = 8, 32
#: Rounds that the estimate of their cost remembers, roughly.
ROUNDS_KEPT = 8


class WakeBudget:
    """How many tasks may be woken in one round of the loop, so that no round takes long.

    An event loop runs every task that is ready before it looks at its clock and its sockets again,
    and one read can bring answers for hundreds of tasks. What wakes tasks by the dozen shares a
    budget with all others that do: it says what it spends, and where the budget `is_spent` it
    awaits `renewed`. Those who wait take turns.

    A wake-up stands for the work that it sets off. Its cost is the time between two renewals by
    the wake-ups between them, on the loop's own clock: in virtual time nothing costs anything, and
    the rounds of a run are the same each time.
    """

    def __init__(self) -> None:
        self._clock = thread_cpu if may_leave_loop() else loop_clock()
        self._wake_s = ROUND_S / FIRST_WAKES
        self._allowed = self._left = float(FIRST_WAKES)
        self._renewed_at = self._clock()
        self._waiting: deque[anyio.Event] = deque()
        self._renewer: anyio.Event | None = None

    @property
    def is_spent(self) -> bool:
        """Whether the next wake-up is one of a later round."""
        return self._left <= 0

    def spend(self, wakes: float = 1.0) -> None:
        """A task is woken; fractions of one count too."""
        self._left -= wakes

    async def take(self, wakes: float = 1.0) -> None:
        """Spend it, in a later round where this one's budget is spent."""
        if self._left <= 0:
            await self.renewed()
        self._left -= wakes

    async def renewed(self) -> None:
        """Return in a later round, with something to spend; at least one wake-up is meant for us.

        Cancellation leaves the turn to the others.
        """
        turn = anyio.Event()
        self._waiting.append(turn)
        if self._renewer is None:
            self._call(1)
        try:
            await turn.wait()
        finally:
            if turn is self._renewer:
                self._renew()
            elif not turn.is_set():
                self._waiting.remove(turn)

    def _renew(self) -> None:
        """Begin a round, and call those whose turn is the next one."""
        now = self._clock()
        cost_s = (now - self._renewed_at) / max(1.0, self._allowed - self._left)
        self._wake_s += (min(cost_s, ROUND_S) - self._wake_s) / ROUNDS_KEPT
        self._allowed = self._left = ROUND_S // max(self._wake_s, ROUND_S / MOST_WAKES)
        self._renewed_at = now
        self._renewer = None
        self._call(int(self._allowed))

    def _call(self, most: int) -> None:
        """Have the first ones return in the next round; the first of them renews the budget."""
        for _ in range(min(most, len(self._waiting))):
            turn = self._waiting.popleft()
            if self._renewer is None:
                self._renewer = turn
            turn.set()
