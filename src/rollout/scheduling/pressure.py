"""How many trajectories may run at once, given what the engines say of themselves.

More in flight than the engines' KV caches hold does not make batches larger: the others wait in a
queue, and a request whose turn comes finds its prefix pushed out of the cache and has
it computed again. The prefixes fit when there are no more trajectories than *requests that fill
the caches*: those that run, divided by the share of the caches that they hold.

Fewer in flight cost something too: while some wait for their tools, batches are smaller, and every
decoding step serves fewer. So the number is held down only where engines compute more tokens again
for each one sampled than that costs. A pure state machine: it owns no task and no clock.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.engine.core import EngineLoad

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


@attrs.frozen
class _Look:
    """One observation."""

    queued: dict[str, int]
    running: int
    kv_used: float
    generated: int
    progress: Progress


@attrs.frozen
class _Window:
    """What the last observations say together.

    Attributes:
        standing: Requests that waited all the time.
        running, kv_used: Means of the requests in the batches and of the caches' use.
        lost: Tokens computed again for each one sampled; 0 where it is not known.
    """

    standing: int
    running: float
    kv_used: float
    lost: float


@attrs.define
class AdmissionController:
    """The number of trajectories in flight, adapted to what engines can remember.

    A cut is to a number that is measured, not by a share of the last one: looking again before it
    has acted gives the same number. What it is measured from is averaged over a trajectory's
    lifetime, because prefixes are short at first and all long in the end; where trajectories
    finish at a steady pace, as many finish in a lifetime as are in flight (Little 1961).

    Attributes:
        most: Never more than this; also the start, and the number while nothing is in flight.
        least: Never fewer than this, so that a batch always progresses.
        allowed: The number now.
    """

    most: int
    least: int = 1
    allowed: int = attrs.field(init=False)
    _looks: deque[_Look] = attrs.field(init=False, factory=lambda: deque(maxlen=WINDOW))
    _share: float = attrs.field(init=False, default=0.0)  # of the caches, held by one request
    _kv_used: float = attrs.field(init=False, default=0.0)
    _lost: float = attrs.field(init=False, default=0.0)  # without a limit; 0: there is none
    _growth: float = attrs.field(init=False, default=1.0)

    def __attrs_post_init__(self) -> None:
        self.allowed = self.most

    def observe(self, loads: Mapping[str, EngineLoad], in_flight: int, progress: Progress) -> int:
        """Take one round of loads, by replica; the number allowed from now on.

        Args:
            loads: What each live engine last said.
            in_flight: Trajectories running now.
            progress: What trajectories have done.
        """
        if in_flight == 0:  # the next batch begins with short prefixes
            self._looks.clear()
            self._release()
        elif loads:
            self._looks.append(_look_at(loads, progress))
            if len(self._looks) == WINDOW:
                self._adjust(_window_of(self._looks), in_flight)
        return self.allowed

    def _adjust(self, window: _Window, in_flight: int) -> None:
        lifetimes = self._learn(window, in_flight)
        if window.running < 1:
            return
        served, is_full = in_flight - window.standing, window.kv_used > HIGH_KV
        cost = STEP_TOKENS * max(0.0, served / window.running - 1) * self._share
        if window.standing and is_full and self._lost and self._lost < cost:
            self._release()
        elif window.standing and is_full and window.lost > cost:
            self._lost, self._growth = max(self._lost, window.lost), 1.0
        elif not window.standing and self._kv_used < LOW_KV and in_flight >= self.allowed:
            self._growth *= 1 + INCREASE * lifetimes
        if self._lost:
            self._limit()

    def _learn(self, window: _Window, in_flight: int) -> float:
        """Average what is measured over a lifetime; the lifetimes since the last observation."""
        last, before = self._looks[-1].progress, self._looks[-2].progress
        lifetimes = min(1.0, (last.finished - before.finished) / in_flight)
        weight = lifetimes if self._lost else 1.0
        if window.running >= 1:
            self._share += weight * (window.kv_used / window.running - self._share)
        self._kv_used += weight * (window.kv_used - self._kv_used)
        return lifetimes

    def _limit(self) -> None:
        fitting = int(self._growth / max(self._share, 1 / self.most))
        if fitting >= self.most:
            self._release()
        else:
            self.allowed = max(fitting, self.least)

    def _release(self) -> None:
        self._lost, self._growth, self.allowed = 0.0, 1.0, self.most


def _look_at(loads: Mapping[str, EngineLoad], progress: Progress) -> _Look:
    return _Look(
        queued={name: load.queued for name, load in loads.items()},
        running=sum(load.running for load in loads.values()),
        kv_used=statistics.fmean(load.kv_used for load in loads.values()),
        generated=sum(load.generated_tokens for load in loads.values()),
        progress=progress,
    )


def _window_of(looks: Sequence[_Look]) -> _Window:
    first, last = looks[0], looks[-1]
    return _Window(
        standing=sum(min(look.queued.get(name, 0) for look in looks) for name in last.queued),
        running=statistics.fmean(look.running for look in looks),
        kv_used=statistics.fmean(look.kv_used for look in looks),
        lost=_lost_between(first, last),
    )


def _lost_between(first: _Look, last: _Look) -> float:
    """Of an engine that has never reused anything it is not known: it may not say so."""
    known = last.progress.known_tokens - first.progress.known_tokens
    lost = known - (last.progress.reused_tokens - first.progress.reused_tokens)
    sampled = last.generated - first.generated
    if not last.progress.reused_tokens or sampled <= 0 or lost <= LOST_SHARE * known:
        return 0.0
    return lost / sampled
