"""Which requests a scenario's faults hit, and what they do to an answer.

Loaded in engine processes: imports msgspec and the standard library only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from rollout.engine.cores.simulated.options import Faults
from rollout.engine.cores.simulated.stable import stable_share

if TYPE_CHECKING:
    from rollout.engine.core import Chunk


class FaultPlan:
    """The faults of one replica.

    Which requests are hit depends on the scenario's seed and on how many came before, not on
    their ids: one order of requests meets the same faults each time, and a request that is tried
    again is drawn again.
    """

    def __init__(self, faults: Faults, seed: int, replica: int) -> None:
        has_faults = faults.replicas is None or replica in faults.replicas
        self.faults = faults if has_faults else Faults()
        self._seed = seed
        self._requests = 0

    def draw(self) -> RequestFaults:
        """The faults of the next request."""
        self._requests += 1
        return RequestFaults(
            reject=self._is_hit("reject", self.faults.reject_share),
            duplicate=self._is_hit("duplicate", self.faults.duplicate_answers),
            reorder=self._is_hit("reorder", self.faults.reordered_answers),
            wrong_length=self._is_hit("wrong_length", self.faults.wrong_length),
        )

    def _is_hit(self, name: str, share: float) -> bool:
        return share > 0 and stable_share(self._seed, name, self._requests) < share


class RequestFaults:
    """What goes wrong with one request's answer; chunks pass through in order."""

    __slots__ = ("_delayed", "_duplicate", "_reorder", "_wrong_length", "reject")

    def __init__(self, *, reject: bool, duplicate: bool, reorder: bool, wrong_length: bool) -> None:
        self.reject = reject
        self._duplicate = duplicate
        self._reorder = reorder
        self._wrong_length = wrong_length
        self._delayed: Chunk | None = None

    def apply(self, chunk: Chunk) -> list[Chunk]:
        """What is sent at the moment at which `chunk` should be."""
        if self._wrong_length and chunk.ids:
            self._wrong_length = False
            chunk = msgspec.structs.replace(chunk, log_probs=chunk.log_probs[:-4])
        is_last = chunk.finish_reason is not None
        sent = [chunk, chunk] if self._duplicate and is_last else [chunk]
        if not self._reorder:
            return sent
        delayed, self._delayed = self._delayed, None if is_last else chunk
        if is_last:
            return sent if delayed is None else [*sent, delayed]
        return [] if delayed is None else [delayed]


class Freeze:
    """A stretch in which the engine is frozen, and the engine's own time around it."""

    def __init__(self, start: float, length: float) -> None:
        self.start = start
        self.end = start + length

    @classmethod
    def of(cls, faults: Faults, started_at: float) -> Freeze:
        """The freeze of an engine that started then; one at infinity where there is none."""
        if faults.freeze_at_s is None:
            return cls(math.inf, 0.0)
        length = math.inf if faults.freeze_s is None else faults.freeze_s
        return cls(started_at + faults.freeze_at_s, length)

    def covers(self, now: float) -> bool:
        """Whether the engine is frozen."""
        return self.start < now < self.end

    def to_engine_time(self, now: float) -> float:
        """The engine's clock, which stops during the freeze."""
        if now <= self.start:
            return now
        return self.start if now < self.end else now - (self.end - self.start)

    def to_clock_time(self, engine_time: float) -> float:
        """When the engine's clock shows that time."""
        if engine_time <= self.start:
            return engine_time
        return engine_time + (self.end - self.start)
