"""One request inside the simulated engine.

Loaded in engine processes: imports msgspec and the standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from array import array

    from rollout.engine.core import FinishReason
    from rollout.engine.cores.simulated.kv_cache import Lease


class Sink(Protocol):
    """Where the tokens of a job go."""

    def emit(self, job: Job, first: int, stop: int, reason: FinishReason | None) -> None:
        """Ids ``[first, stop)`` of the answer are due; the last call has a finish reason."""


class Job:
    """A request in the engine's queue or batch.

    Attributes:
        prompt: int32 little-endian, packed.
        answer: All ids that it samples unless it is aborted.
        finish_reason: How the answer ends then.
        order: Place in the queue; the smallest is first.
        cached_tokens: Prompt tokens that were warm when it was first let in.
        emitted: Ids handed to the sink.
        leaves_at: When what it has sampled leaves at the latest.
        base: Ids sampled when it joined the batch, at the end of step `joined`.
    """

    __slots__ = (
        "answer",
        "base",
        "cached_tokens",
        "emitted",
        "finish_reason",
        "is_aborted",
        "is_done",
        "joined",
        "lease",
        "leaves_at",
        "order",
        "prompt",
        "sink",
    )

    def __init__(
        self,
        prompt: bytes,
        answer: array[int],
        finish_reason: FinishReason,
        sink: Sink,
        priority: int = 0,
    ) -> None:
        self.prompt = prompt
        self.answer = answer
        self.finish_reason: FinishReason = finish_reason
        self.sink = sink
        self.order = (-priority, 0)
        self.cached_tokens = 0
        self.emitted = 0
        self.leaves_at = 0.0
        self.base = 0
        self.joined = 0
        self.lease: Lease | None = None
        self.is_aborted = False
        self.is_done = False

    def sampled(self, step: int) -> int:
        """Ids sampled by the end of `step`, while it runs."""
        return self.base + step - self.joined

    def sequence(self, sampled: int) -> bytes:
        """Prompt and sampled ids, packed."""
        return self.prompt + self.answer[:sampled].tobytes()
