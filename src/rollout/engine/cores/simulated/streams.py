"""The way from the batch to the tasks that iterate over answers, without a task of its own.

Loaded in engine processes: imports msgspec, anyio and the standard library only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import anyio

from rollout.engine.core import Chunk, FinishReason
from rollout.engine.cores.base import OpenRequest
from rollout.engine.cores.simulated.vocabulary import choose_expert, compute_log_probs, compute_top

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.engine.core import GenerationRequest
    from rollout.engine.cores.simulated.batching import Job
    from rollout.engine.cores.simulated.options import Experts
    from rollout.engine.cores.simulated.scenario_faults import RequestFaults


class Stream(OpenRequest):
    """The chunks of one request on their way to the iterating task.

    Attributes:
        chunks: Sent and not yet taken.
        is_ended: The last chunk has been sent.
        job: The request in the batch; None where it never got there.
        weight_version: Stamped on what is emitted from now on.
    """

    __slots__ = (
        "_experts",
        "_faults",
        "_known_experts",
        "_request",
        "chunks",
        "is_ended",
        "job",
        "wakeup",
        "weight_version",
    )

    def __init__(
        self,
        request: GenerationRequest,
        weight_version: int,
        faults: RequestFaults,
        experts: Experts | None = None,
    ) -> None:
        super().__init__(request.request_id)
        self._request = request
        self._experts = experts if request.routed_experts else None
        self._known_experts = request.routed_experts_start
        self.weight_version = weight_version
        self._faults = faults
        self.chunks: deque[Chunk] = deque()
        self.is_ended = False
        self.job: Job | None = None
        self.wakeup: anyio.Event | None = None

    def refuse(self, reason: FinishReason, error: str) -> None:
        """Answer without a token."""
        self._send(Chunk(request_id=self._request.request_id, finish_reason=reason, error=error))

    def emit(self, job: Job, first: int, stop: int, reason: FinishReason | None) -> None:
        """See `Job.emit`."""
        ids, position = job.answer[first:stop], len(job.prompt) // 4 + first
        top_ids, top_log_probs = compute_top(ids, position, self._request.sampling.top_log_probs)
        self._send(
            Chunk(
                request_id=self._request.request_id,
                offset=first,
                ids=ids.tobytes(),
                log_probs=compute_log_probs(ids, position).tobytes(),
                top_ids=top_ids.tobytes(),
                top_log_probs=top_log_probs.tobytes(),
                routed_experts=self._experts_up_to(job, stop),
                weight_version=self.weight_version,
                finish_reason=reason,
                cached_tokens=0 if reason is None else job.cached_tokens,
            )
        )

    def _experts_up_to(self, job: Job, sampled: int) -> bytes:
        """Of the tokens computed to sample so many, those that no chunk had before."""
        experts = self._experts
        if experts is None or not sampled:
            return b""
        ids = array("i")
        ids.frombytes(job.sequence(sampled - 1))
        first, self._known_experts = self._known_experts, len(ids)
        return array(
            "h",
            [
                choose_expert(ids[at], at, layer, rank, experts.count)
                for at in range(first, len(ids))
                for layer in range(experts.layers)
                for rank in range(experts.top_k)
            ],
        ).tobytes()

    def wake(self) -> None:
        """Have the task that sleeps over this stream look again."""
        if self.wakeup is not None:
            self.wakeup.set()

    def _send(self, chunk: Chunk) -> None:
        self.is_ended = chunk.finish_reason is not None
        self.chunks += self._faults.apply(chunk)
        self.wake()


class Sleepers:
    """The tasks that wait for chunks; one of them drives the engine for all.

    The driver sleeps until the engine's next event, advances the engine, which may fill any
    stream, and sleeps again; when it has got its own chunk, or is cancelled, the next one takes
    the wheel. So no task is needed beside those that wait anyway, and none can be left behind.

    Args:
        advance: Lets everything happen that happens up to now.
        next_event: When something happens next without further input.
        is_ready: Whether a stream has a chunk that may be taken; raises where none will come.
    """

    def __init__(
        self,
        *,
        advance: Callable[[], None],
        next_event: Callable[[], float],
        is_ready: Callable[[Stream], bool],
    ) -> None:
        self._advance = advance
        self._next_event = next_event
        self._is_ready = is_ready
        self._waiting: OrderedDict[Stream, None] = OrderedDict()
        self._driver: Stream | None = None

    async def wait(self, stream: Stream) -> None:
        """Return when `stream` is ready."""
        self._waiting[stream] = None
        try:
            while not self._is_ready(stream):
                if self._driver is None:
                    self._driver = stream
                await self._sleep_until_woken(stream)
        finally:
            del self._waiting[stream]
            if self._driver is stream:
                self._driver = next(iter(self._waiting), None)
                self.replan()

    def replan(self) -> None:
        """Have the driver look again when the next event is."""
        if self._driver is not None:
            self._driver.wake()

    def wake_all(self) -> None:
        """Have all waiting tasks look again."""
        for stream in self._waiting:
            stream.wake()

    async def _sleep_until_woken(self, stream: Stream) -> None:
        """Sleep until woken; as the driver, or over delayed chunks, until the next event."""
        stream.wakeup = anyio.Event()
        if self._driver is not stream and not stream.chunks:
            await stream.wakeup.wait()
            return
        self._advance()
        if not self._is_ready(stream):
            with anyio.CancelScope(deadline=self._next_event()):
                await stream.wakeup.wait()
            self._advance()
