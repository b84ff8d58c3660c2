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
        shares = {
            "reject": self.faults.reject_share,
            "duplicate": self.faults.duplicate_answers,
            "reorder": self.faults.reordered_answers,
            "wrong_length": self.faults.wrong_length,
        }
        return RequestFaults(
            {
                name
                for name, share in shares.items()
                if share > 0 and stable_share(self._seed, name, self._requests) < share
            }
        )


class RequestFaults:
    """What goes wrong with one request's answer; chunks pass through in order."""

    __slots__ = ("_delayed", "_names", "reject")

    def __init__(self, names: set[str]) -> None:
        self.reject = "reject" in names
        self._names = names
        self._delayed: Chunk | None = None

    def apply(self, chunk: Chunk) -> list[Chunk]:
        """What is sent at the moment at which `chunk` should be."""
        if "wrong_length" in self._names and chunk.ids:
            self._names.remove("wrong_length")
            chunk = msgspec.structs.replace(chunk, log_probs=chunk.log_probs[:-4])
        is_last = chunk.finish_reason is not None
        sent = [chunk, chunk] if "duplicate" in self._names and is_last else [chunk]
        if "reorder" not in self._names:
            return sent
        delayed, self._delayed = self._delayed, None if is_last else chunk
        if is_last:
            return sent if delayed is None else [*sent, delayed]
        return [] if delayed is None else [delayed]


class Freeze:
    """A stretch in which the engine is frozen, and the engine's own time around it."""

    def __init__(self, faults: Faults, started_at: float) -> None:
        at_s, length_s = faults.freeze_at_s, faults.freeze_s
        self.start = math.inf if at_s is None else started_at + at_s
        self.end = self.start + (math.inf if length_s is None else length_s)

    def covers(self, now: float) -> bool:
        """Whether the engine is frozen."""
        return self.start < now < self.end

    def to_engine_time(self, now: float) -> float:
        """The engine's clock, which stops during the freeze."""
        return now if now <= self.start else max(self.start, now - (self.end - self.start))

    def to_clock_time(self, engine_time: float) -> float:
        """When the engine's clock shows that time."""
        if engine_time <= self.start:
            return engine_time
        return engine_time + (self.end - self.start)
