"""The slots that trajectories run in, and how many there are, by what engines report of themselves.

More in flight than the engines' KV caches hold does not make batches larger: the others wait in a
queue, and a request whose turn comes finds its prefix pushed out of the cache and has
it computed again. The prefixes fit when there are no more trajectories than *requests that fill
the caches*: those that run, divided by the share of the caches that they hold.

Fewer in flight cost something too: while some wait for their tools, batches are smaller, and every
decoding step serves fewer. So the number is held down only where engines compute more tokens again
for each one sampled than that costs.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean
from typing import TYPE_CHECKING

import anyio
import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rollout.engine.core import EngineLoad


#: Seconds between two observations of the engines' load; they report it once a heartbeat.
OBSERVE_S = 1.0
#: Observations that are judged together. A queue that never empties in them is a standing one (the
#: measure of CoDel, Nichols and Jacobson 2012); bursts are none.
WINDOW = 6
#: Mean KV use past which it is memory that requests wait for.
HIGH_KV = 0.90
#: Mean KV use below which there is room for the prefixes of more trajectories.
LOW_KV = 0.50
#: Share of the tokens that engines had and compute again, past which that may matter.
LOST_SHARE = 0.3
#: What a decoding step costs, in prompt tokens that could be computed in its time: about 200 on
#: current GPUs, 8B to 70B; taken twice, because what is lost is certain and what is won is not.
STEP_TOKENS = 400.0
#: By how much the number grows in a trajectory's lifetime while there is room.
INCREASE = 0.5


class Admission:
    """Bounds the trajectories in flight; may be paused, and yields to pressure.

    Attributes:
        limiter: Members take their slot from it; its total is the number allowed now.
        on_change: Called when that has changed.
    """

    def __init__(self, most: int, *, is_adaptive: bool) -> None:
        self.limiter = anyio.CapacityLimiter(most)
        self._controller = AdmissionController(most)
        self._is_adaptive = is_adaptive
        self._pauses = 0
        self.on_change: Callable[[], object] = lambda: None

    @property
    def allowed(self) -> int:
        """Trajectories that may run at once now; 0 while paused."""
        return int(self.limiter.total_tokens)

    def pause(self) -> None:
        """Start no further trajectory until `resume`; those that run continue. Pauses nest."""
        self._pauses += 1
        self._apply()

    def resume(self) -> None:
        """Undo one `pause`."""
        if self._pauses == 0:
            raise ValueError("resume: admission is not paused")
        self._pauses -= 1
        self._apply()

    async def adapt(
        self, loads: Callable[[], Mapping[str, EngineLoad]], progress: Callable[[], Progress]
    ) -> None:
        """Follow the engines' load until cancelled."""
        if not self._is_adaptive:
            return
        while True:
            await anyio.sleep(OBSERVE_S)
            self._controller.observe(loads(), self.limiter.borrowed_tokens, progress())
            self._apply()

    def _apply(self) -> None:
        self.limiter.total_tokens = 0 if self._pauses else self._controller.allowed
        self.on_change()


@attrs.frozen
class Progress:
    """What trajectories have done since the start.

    Attributes:
        finished: Those that have ended.
        known_tokens: Tokens with which later turns began and which an engine had had before.
        reused_tokens: Those of them that were still in its cache.
    """

    finished: int = 0
    known_tokens: int = 0
    reused_tokens: int = 0


class AdmissionController:
    """The number of trajectories in flight, adapted to what engines can remember.

    A state machine without a task or a clock. A cut is to a number that is measured, not by a share
    of the last one: observing again before it has acted gives the same number. What it is measured
    from is averaged over a trajectory's lifetime, because prefixes are short at first and all long
    in the end; where trajectories finish at a steady pace, as many finish in a lifetime as are in
    flight (Little 1961).

    Attributes:
        most: Never more than this; also the start, and the number while nothing is in flight.
        allowed: The number now.
    """

    def __init__(self, most: int) -> None:
        self.most = self.allowed = most
        #: The last observations: loads by replica, and what trajectories had done.
        self._window: deque[tuple[Mapping[str, EngineLoad], Progress]] = deque(maxlen=WINDOW)
        self._share = self._kv_used = 0.0  # of the caches, held by one request and by all
        self._lost, self._growth = 0.0, 1.0  # lost without a limit; 0: there is none

    def observe(self, loads: Mapping[str, EngineLoad], in_flight: int, progress: Progress) -> int:
        """Take one round of loads, by replica; return the number allowed from now on.

        Args:
            loads: What each live engine last reported.
            in_flight: Trajectories running now.
            progress: What trajectories have done.
        """
        if in_flight == 0:  # the next batch begins with short prefixes
            self._window.clear()
            self._release()
        elif loads:
            self._window.append((dict(loads), progress))
            if len(self._window) == WINDOW:
                self._adjust(in_flight)
        return self.allowed

    def _adjust(self, in_flight: int) -> None:
        loads, last = [each for each, _ in self._window], self._window[-1][0]
        # Requests that waited all the time.
        standing = sum(
            min(each[name].queued if name in each else 0 for each in loads) for name in last
        )
        running = fmean(sum(load.running for load in each.values()) for each in loads)
        kv_used = fmean(fmean(load.kv_used for load in each.values()) for each in loads)
        lost = self._measure_lost()
        lifetimes = self._learn(running, kv_used, in_flight)
        if running < 1:
            return
        cost = STEP_TOKENS * max(0.0, (in_flight - standing) / running - 1) * self._share
        is_short = standing and kv_used > HIGH_KV
        if is_short and self._lost and self._lost < cost:
            self._release()
        elif is_short and lost > cost:
            self._lost, self._growth = max(self._lost, lost), 1.0
        elif not standing and self._kv_used < LOW_KV and in_flight >= self.allowed:
            self._growth *= 1 + INCREASE * lifetimes
        if self._lost:
            fitting = int(self._growth / max(self._share, 1 / self.most))
            if fitting >= self.most:
                self._release()
            else:
                self.allowed = max(fitting, 1)  # so that a batch always progresses

    def _learn(self, running: float, kv_used: float, in_flight: int) -> float:
        """Average what is measured over a lifetime; the lifetimes since the last observation."""
        last, before = self._window[-1][1], self._window[-2][1]
        lifetimes = min(1.0, (last.finished - before.finished) / in_flight)
        weight = lifetimes if self._lost else 1.0
        if running >= 1:
            self._share += weight * (kv_used / running - self._share)
        self._kv_used += weight * (kv_used - self._kv_used)
        return lifetimes

    def _measure_lost(self) -> float:
        """Tokens computed again for each one sampled; 0 where it is not known.

        Of an engine that has never reused anything it is not known: it may not say so.
        """
        (first_loads, first), (last_loads, last) = self._window[0], self._window[-1]
        known = last.known_tokens - first.known_tokens
        lost = known - (last.reused_tokens - first.reused_tokens)
        sampled = sum(load.generated_tokens for load in last_loads.values())
        sampled -= sum(load.generated_tokens for load in first_loads.values())
        if not last.reused_tokens or sampled <= 0 or lost <= LOST_SHARE * known:
            return 0.0
        return lost / sampled

    def _release(self) -> None:
        self._lost, self._growth, self.allowed = 0.0, 1.0, self.most
