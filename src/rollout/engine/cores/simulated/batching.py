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
from typing import TYPE_CHECKING

from rollout.engine.core import EngineLoad, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.engine.cores.simulated.jobs import Job
    from rollout.engine.cores.simulated.kv_cache import KvCache
    from rollout.engine.cores.simulated.options import Timing

#: Clocks are compared with this tolerance; it is far below any step.
EPSILON_S = 1e-9


class Batcher:
    """The engine's schedule.

    Call `advance` with the current time before anything else at that time. Its clock never goes
    back, and it is never ahead of the time given.

    Args:
        stream_interval: Tokens of a chunk.
        stream_interval_s: A chunk leaves with fewer when the one before it left so long ago.
    """

    def __init__(
        self,
        *,
        timing: Timing,
        kv: KvCache,
        max_running: int,
        max_queued: int,
        stream_interval: int,
        stream_interval_s: float = math.inf,
        die_after_tokens: int | None = None,
    ) -> None:
        self._timing = timing
        self._kv = kv
        self._max_running = max_running
        self._max_jobs = max_running + max_queued
        self._stream_interval = stream_interval
        self._stream_interval_s = stream_interval_s
        self._die_after_tokens = die_after_tokens
        self._queue: list[tuple[tuple[int, int], Job]] = []
        self._queued = 0
        self._running: dict[Job, None] = {}  # in the order of their admission
        self._aborting: list[Job] = []
        # The chunks to come, as (step, serial, job). An entry of a job that has left the batch
        # does no harm: nothing is due when its step comes.
        self._due: list[tuple[int, int, Job]] = []
        # Jobs whose tokens have to leave, as (time, serial, job), to the same rule.
        self._leaving: list[tuple[float, int, Job]] = []
        self._serial = 0
        self._step = 0
        self._phase_start = 0.0
        self._phase_steps = 0  # 0 in a prefill
        self._step_s = 0.0
        self._phase_end = math.inf
        self._generated = 0
        self._preemptions = 0
        self.is_dead = False

    @property
    def next_event(self) -> float:
        """When something happens next without further input; infinite if nothing does."""
        return min(self._phase_end, self._leaving[0][0]) if self._leaving else self._phase_end

    def load(self, now: float) -> EngineLoad:
        """What the engine is doing at `now`."""
        return EngineLoad(
            running=len(self._running),
            queued=self._queued,
            kv_used=self._kv.used_share,
            generated_tokens=self._generated + self._steps_by(now) * len(self._running),
            preemptions=self._preemptions,
        )

    def submit(self, job: Job, now: float) -> bool:
        """Take a request in; False where running and queued ones fill the engine already."""
        if len(self._running) + self._queued >= self._max_jobs:
            return False
        self._serial += 1
        job.order = (job.order[0], self._serial)
        self._enqueue(job)
        if len(self._running) < self._max_running:
            self._interrupt(now)
        return True

    def abort(self, job: Job, now: float) -> None:
        """End a request: at once in the queue, at the end of the step under way in the batch."""
        if job.is_done or job.is_aborted:
            return
        job.is_aborted = True
        if job in self._running:
            self._aborting.append(job)
            self._interrupt(now)
        else:
            self._queued -= 1
            self._finish(job, job.base, "abort")

    def flush(self, now: float) -> None:
        """Hand every running request's tokens over that it has by `now`."""
        self._split(now)
        for job in list(self._running):
            if job.sampled(self._step) > job.emitted:
                self._emit_chunk(job, now)

    def _split(self, now: float) -> None:
        """End the steps that are over by `now`; the phase continues."""
        steps = self._steps_by(now)
        if steps:
            self._phase_steps -= steps
            self._phase_start += steps * self._step_s
            self._end_steps(steps, now)

    def forget_prefixes(self, salt: bytes) -> None:
        """Nothing computed so far serves a request that comes later; `salt` must be a new one."""
        self._kv.forget(salt)

    def advance(self, now: float) -> None:
        """Let everything happen that happens up to `now`."""
        while self.next_event <= now + EPSILON_S and not self.is_dead:
            if self.next_event < self._phase_end:
                self._hand_over()
                continue
            at, self._phase_end = self._phase_end, math.inf
            if self._phase_steps:
                self._end_steps(self._phase_steps, at)
            if not self.is_dead:
                self._begin_phase(at)

    def _hand_over(self) -> None:
        """The tokens of one request have waited for long enough."""
        at, _, job = heapq.heappop(self._leaving)
        if job not in self._running or job.leaves_at != at:
            return
        self._split(at)
        if self.is_dead or job not in self._running:
            return
        if job.sampled(self._step) > job.emitted:
            self._emit_chunk(job, at)
        else:
            self._schedule_leave(job, at)

    def end_all(self) -> None:
        """Every request ends with "abort"."""
        for job in [*self._running, *(job for _, job in self._queue)]:
            if not job.is_done:
                self._finish(job, job.emitted, "abort")
        self._phase_end = math.inf

    def _interrupt(self, now: float) -> None:
        """Something has changed: end the phase as soon as the hardware lets us."""
        if math.isinf(self._phase_end):
            self._begin_phase(now)
        elif self._phase_steps:
            self._phase_steps = min(self._phase_steps, self._steps_by(now, math.ceil))
            self._phase_end = self._phase_start + self._phase_steps * self._step_s
            if self._phase_steps == 0:
                self._begin_phase(now)
        elif now <= self._phase_start + EPSILON_S:  # a prefill that has only just begun takes more
            self._phase_end += self._admit(now)

    def _steps_by(self, now: float, rounded: Callable[[float], int] = math.floor) -> int:
        """Steps of the current phase that are over by `now`."""
        if not self._phase_steps or self._step_s == 0:
            return 0
        toward = EPSILON_S if rounded is math.floor else -EPSILON_S
        return min(rounded((now - self._phase_start + toward) / self._step_s), self._phase_steps)

    def _begin_phase(self, at: float) -> None:
        for job in self._aborting:
            if not job.is_done:
                self._finish(job, job.sampled(self._step), "abort")
        self._aborting.clear()
        prefill_s = self._admit(at)
        self._phase_start, self._phase_steps = at, 0
        if prefill_s > 0:
            self._phase_end = at + prefill_s
        elif self._running:
            self._plan_steps()
        else:
            self._phase_end = math.inf

    def _plan_steps(self) -> None:
        while self._kv.room < len(self._running):
            self._preempt(next(reversed(self._running)))
        batch = len(self._running)
        steps = min(self._due[0][0] - self._step, self._kv.room // batch)
        if self._die_after_tokens is not None:
            left = self._die_after_tokens - self._generated
            steps = min(steps, -(-left // batch))
        self._phase_steps = steps
        self._step_s = self._timing.base_s + self._timing.slope_s * batch
        self._phase_end = self._phase_start + steps * self._step_s

    def _end_steps(self, steps: int, at: float) -> None:
        batch = len(self._running)
        self._step += steps
        self._generated += steps * batch
        self._kv.extend(steps * batch)
        if self._die_after_tokens is not None and self._generated >= self._die_after_tokens:
            self.is_dead = True
            return
        while self._due and self._due[0][0] <= self._step:
            step, _, job = heapq.heappop(self._due)
            if job in self._running and step == self._due_step(job):
                self._emit_chunk(job, at)

    def _emit_chunk(self, job: Job, at: float) -> None:
        sampled = job.sampled(self._step)
        if sampled == len(job.answer):
            self._finish(job, sampled, job.finish_reason)
            return
        first, job.emitted = job.emitted, sampled
        self._schedule_chunk(job)
        self._schedule_leave(job, at)
        job.sink.emit(job, first, sampled, None)

    def _due_step(self, job: Job) -> int:
        """The step at whose end the next chunk of a running job is due."""
        tokens = min(job.emitted + self._stream_interval, len(job.answer))
        return job.joined + tokens - job.base

    def _schedule_chunk(self, job: Job) -> None:
        self._serial += 1
        heapq.heappush(self._due, (self._due_step(job), self._serial, job))

    def _schedule_leave(self, job: Job, at: float) -> None:
        """What it samples from now on leaves within the interval."""
        if self._stream_interval_s < math.inf:
            self._serial += 1
            job.leaves_at = at + self._stream_interval_s
            heapq.heappush(self._leaving, (job.leaves_at, self._serial, job))

    def _admit(self, at: float) -> float:
        """Let waiting requests in while there is room; the seconds that their prefill takes."""
        uncached = 0
        while self._queue and len(self._running) < self._max_running:
            job = self._queue[0][1]
            if not job.is_aborted:
                sequence = job.sequence(job.base)
                job.lease = self._kv.acquire(sequence, spare=len(self._running) + 1)
                if job.lease is None:
                    break
                uncached += len(sequence) // 4 - job.lease.cached_tokens
                self._join(job, job.lease.cached_tokens, at)
            heapq.heappop(self._queue)
        speed = self._timing.prefill_tokens_per_s
        return uncached / speed if speed else 0.0

    def _join(self, job: Job, cached_tokens: int, at: float) -> None:
        if job.base == 0:
            job.cached_tokens = cached_tokens
        self._queued -= 1
        self._running[job] = None
        job.joined = self._step
        self._schedule_chunk(job)
        self._schedule_leave(job, at)

    def _preempt(self, job: Job) -> None:
        self._preemptions += 1
        sampled = job.sampled(self._step)
        if sampled > job.emitted and self._stream_interval_s < math.inf:
            first, job.emitted = job.emitted, sampled
            job.sink.emit(job, first, sampled, None)
        self._leave(job, sampled, keep=False)
        self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        heapq.heappush(self._queue, (job.order, job))
        self._queued += 1

    def _leave(self, job: Job, sampled: int, *, keep: bool) -> None:
        assert job.lease is not None
        del self._running[job]
        self._kv.release(job.lease, job.sequence(sampled), keep=keep)
        job.base = sampled

    def _finish(self, job: Job, sampled: int, reason: FinishReason) -> None:
        if job in self._running:
            self._leave(job, sampled, keep=True)
        job.is_done = True
        job.sink.emit(job, job.emitted, sampled, reason)
