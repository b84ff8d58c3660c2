"""Continuous batching as arithmetic: a pure state machine that owns no task and no clock.

The engine alternates between two kinds of phases. A *prefill* takes in every waiting request that
finds room and lasts for their uncached tokens; nothing is decoded meanwhile. A *decode* phase is a
number of equal steps, each giving every running request one token; it is planned up to the next
moment at which something happens (a chunk is due, a request ends, memory runs out) and cut short
at the end of the step under way when a request arrives or is aborted. A phase of thousands of
steps costs as much as one of a single step.

Loaded in engine processes: imports msgspec and the standard library only.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.engine.core import EngineLoad, FinishReason

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from rollout.engine.cores.simulated.kv_cache import KvCache, Lease
    from rollout.engine.cores.simulated.options import Capacity, Timing

#: Clocks are compared with this tolerance; it is far below any step.
EPSILON_S = 1e-9


@dataclass(eq=False, slots=True)
class Job:
    """A request in the engine's queue or batch.

    Attributes:
        prompt: int32 little-endian, packed.
        answer: All ids that it samples unless it is aborted.
        finish_reason: How the answer ends then.
        emit: Called with ``(job, first, stop, reason)`` when ids ``[first, stop)`` of the answer
            are due; the last call has a finish reason.
        priority: Larger ones are let in first.
        order: Its rank in the queue; the smallest is first.
        cached_tokens: Prompt tokens that were warm when it was first let in.
        emitted: Ids that were emitted.
        due: The step at whose end the next chunk is due.
        base: Ids sampled when it joined the batch, at the end of step `joined`.
    """

    prompt: bytes
    answer: array[int]
    finish_reason: FinishReason
    emit: Callable[[Job, int, int, FinishReason | None], None]
    priority: int = 0
    order: tuple[int, int] = (0, 0)
    cached_tokens: int = 0
    emitted: int = 0
    due: int = 0
    base: int = 0
    joined: int = 0
    lease: Lease | None = None
    is_done: bool = False

    def sampled(self, step: int) -> int:
        """Ids sampled by the end of `step`, while it runs."""
        return self.base + step - self.joined

    def sequence(self, sampled: int) -> bytes:
        """Prompt and sampled ids, packed."""
        return self.prompt + self.answer[:sampled].tobytes()


class Batcher:
    """The engine's schedule.

    Call `advance` with the current time before anything else at that time. Its clock never goes
    back, and it is never ahead of the time given.

    Args:
        stream_interval: Tokens of a chunk.
        stream_interval_s: A chunk has fewer where so many would take the batch longer to sample.
        die_after_tokens: The engine dies when it has sampled so many; None: it does not.
    """

    def __init__(
        self,
        *,
        timing: Timing,
        kv: KvCache,
        capacity: Capacity,
        stream_interval: int,
        stream_interval_s: float = math.inf,
        die_after_tokens: int | None = None,
    ) -> None:
        self._timing = timing
        self._kv = kv
        self._max_running = capacity.max_running
        self._max_jobs = capacity.max_running + capacity.max_queued
        self._stream_interval = stream_interval
        self._stream_interval_s = stream_interval_s
        self._die_after_tokens = die_after_tokens
        self._queue: list[Job] = []  # by `order`
        self._running: dict[Job, None] = {}  # in the order of their admission
        self._aborting: list[Job] = []
        # The chunks to come, as (step, serial, job). An entry of a job that has left the batch
        # does no harm: nothing is due when its step comes.
        self._due: list[tuple[int, int, Job]] = []
        self._serial = 0
        self._step = 0
        self._phase_start = 0.0
        self._phase_steps = 0  # 0 in a prefill
        self._step_s = 0.0
        self._generated = 0
        self._preemptions = 0
        self.is_dead = False
        #: When something happens next without further input: the end of the phase.
        self.next_event = math.inf

    def load(self, now: float) -> EngineLoad:
        """What the engine is doing at `now`."""
        return EngineLoad(
            running=len(self._running),
            queued=len(self._queue),
            kv_used=self._kv.used_share,
            generated_tokens=self._generated + self._count_steps(now) * len(self._running),
            preemptions=self._preemptions,
        )

    def submit(self, job: Job, now: float) -> bool:
        """Take a request in; False where running and queued ones fill the engine already."""
        if len(self._running) + len(self._queue) >= self._max_jobs:
            return False
        self._serial += 1
        job.order = (-job.priority, self._serial)
        self._enqueue(job)
        if len(self._running) < self._max_running:
            self._interrupt(now)
        return True

    def abort(self, job: Job, now: float) -> None:
        """End a request: at once in the queue, at the end of the step under way in the batch."""
        if job.is_done:
            return
        if job in self._running:
            self._aborting.append(job)
            self._interrupt(now)
        else:
            self._queue.remove(job)
            self._finish(job, job.base, "abort")

    def flush(self, now: float) -> None:
        """Emit every running request's tokens that it has by `now`; the phase continues."""
        steps = self._count_steps(now)
        if steps:
            self._phase_steps -= steps
            self._phase_start += steps * self._step_s
            self._end_steps(steps)
        for job in list(self._running):
            if job.sampled(self._step) > job.emitted:
                self._emit_chunk(job)

    def advance(self, now: float) -> None:
        """Let everything happen that happens up to `now`."""
        while self.next_event <= now + EPSILON_S and not self.is_dead:
            at, self.next_event = self.next_event, math.inf
            if self._phase_steps:
                self._end_steps(self._phase_steps)
            if not self.is_dead:
                self._begin_phase(at)

    def end_all(self) -> None:
        """Every request ends with "abort"."""
        for job in [*self._running, *self._queue]:
            self._finish(job, job.emitted, "abort")
        self.next_event = math.inf

    def _interrupt(self, now: float) -> None:
        """Something has changed: end the phase as soon as the hardware lets us."""
        if math.isinf(self.next_event):
            self._begin_phase(now)
        elif self._phase_steps:
            self._phase_steps = min(self._phase_steps, self._count_steps(now, math.ceil))
            self.next_event = self._phase_start + self._phase_steps * self._step_s
            if self._phase_steps == 0:
                self._begin_phase(now)
        elif now <= self._phase_start + EPSILON_S:  # a prefill that has only just begun takes more
            self.next_event += self._admit()

    def _count_steps(self, now: float, round_steps: Callable[[float], int] = math.floor) -> int:
        """Steps of the current phase that are over by `now`."""
        if not self._phase_steps or self._step_s == 0:
            return 0
        toward = EPSILON_S if round_steps is math.floor else -EPSILON_S
        steps = round_steps((now - self._phase_start + toward) / self._step_s)
        return min(steps, self._phase_steps)

    def _begin_phase(self, at: float) -> None:
        for job in self._aborting:
            if not job.is_done:
                self._finish(job, job.sampled(self._step), "abort")
        self._aborting.clear()
        prefill_s = self._admit()
        self._phase_start, self._phase_steps = at, 0
        if prefill_s > 0:
            self.next_event = at + prefill_s
        elif self._running:
            self._plan_steps()
        else:
            self.next_event = math.inf

    def _plan_steps(self) -> None:
        while self._kv.room < len(self._running):
            self._preempt(next(reversed(self._running)))
        batch = len(self._running)
        steps = min(self._due[0][0] - self._step, self._kv.room // batch)
        if self._die_after_tokens is not None:
            left = self._die_after_tokens - self._generated
            steps = min(steps, -(-left // batch))
        self._phase_steps = steps
        self._step_s = self._find_step_s()
        self.next_event = self._phase_start + steps * self._step_s

    def _find_step_s(self) -> float:
        return self._timing.base_s + self._timing.slope_s * len(self._running)

    def _end_steps(self, steps: int) -> None:
        batch = len(self._running)
        self._step += steps
        self._generated += steps * batch
        self._kv.extend(steps * batch)
        if self._die_after_tokens is not None and self._generated >= self._die_after_tokens:
            self.is_dead = True
            return
        while self._due and self._due[0][0] <= self._step:
            step, _, job = heapq.heappop(self._due)
            if job in self._running and step == job.due:
                self._emit_chunk(job)

    def _emit_chunk(self, job: Job) -> None:
        sampled = job.sampled(self._step)
        if sampled == len(job.answer):
            self._finish(job, sampled, job.finish_reason)
            return
        first, job.emitted = job.emitted, sampled
        self._schedule_chunk(job)
        job.emit(job, first, sampled, None)

    def _schedule_chunk(self, job: Job) -> None:
        interval, step_s = self._stream_interval, self._find_step_s()
        if interval * step_s > self._stream_interval_s:
            interval = max(1, int(self._stream_interval_s / step_s))
        tokens = min(max(job.emitted + interval, job.base + 1), len(job.answer))
        job.due = job.joined + tokens - job.base
        self._serial += 1
        heapq.heappush(self._due, (job.due, self._serial, job))

    def _admit(self) -> float:
        """Let waiting requests in while there is room; the seconds that their prefill takes."""
        uncached = 0
        while self._queue and len(self._running) < self._max_running:
            job = self._queue[0]
            sequence = job.sequence(job.base)
            job.lease = self._kv.acquire(sequence, spare=len(self._running) + 1)
            if job.lease is None:
                break
            uncached += len(sequence) // 4 - job.lease.cached_tokens
            if job.base == 0:
                job.cached_tokens = job.lease.cached_tokens
            self._running[self._queue.pop(0)] = None
            job.joined = self._step
            self._schedule_chunk(job)
        speed = self._timing.prefill_tokens_per_s
        return uncached / speed if speed else 0.0

    def _preempt(self, job: Job) -> None:
        self._preemptions += 1
        sampled = job.sampled(self._step)
        if sampled > job.emitted and self._stream_interval_s < math.inf:
            first, job.emitted = job.emitted, sampled
            job.emit(job, first, sampled, None)
        self._leave(job, sampled, keep=False)
        self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        insort(self._queue, job, key=lambda queued: queued.order)

    def _leave(self, job: Job, sampled: int, *, keep: bool) -> None:
        assert job.lease is not None
        del self._running[job]
        self._kv.release(job.lease, job.sequence(sampled), keep=keep)
        job.base = sampled

    def _finish(self, job: Job, sampled: int, reason: FinishReason) -> None:
        if job in self._running:
            self._leave(job, sampled, keep=True)
        job.is_done = True
        job.emit(job, job.emitted, sampled, reason)
