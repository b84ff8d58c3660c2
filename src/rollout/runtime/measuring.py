"""What a runtime measures: its calls while they run, and its counts at any time."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import attrs

from rollout.engine.pool.pool import EnginePool
from rollout.engine.pool.replica import LoadWindow, ReplicaStatistics, find_missing
from rollout.engine.pool.request_runner import RecoveryCounts
from rollout.journal.journal import JournalStatistics
from rollout.observe.events import BatchEnded, BatchStarted, RuntimeSampled
from rollout.observe.loop_lag import LagWindow
from rollout.sandbox.pool import PoolStatistics
from rollout.types import format_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.agents.services import Services
    from rollout.observe.loop_lag import LoopLag

#: How often the counts of a runtime are told.
SAMPLE_S = 1.0


@attrs.define(eq=False)
class BatchWindow:
    """What was measured while a call ran; of no call where it has no number.

    Attributes:
        batch: The call's number; -1 for groups whose trajectories had a time each.
        found: The metrics of its batch, once they are known.
    """

    _engines: EnginePool
    batch: int = -1
    _began: float = 0.0
    _lag: LagWindow | None = None
    _load: LoadWindow | None = None
    found: dict[str, float] = attrs.field(factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """By the names that they have in `RolloutBatch.metrics`."""
        version = {"weights/version": float(self._engines.weight_version)}
        if self._lag is None or self._load is None:
            return version
        return {
            **version,
            "batch_s": anyio.current_time() - self._began,
            **self._lag.metrics,
            **self._load.metrics,
        }


class BatchWatch:
    """Numbers the calls of a runtime, and measures what happens meanwhile."""

    def __init__(self, services: Services, lag: LoopLag) -> None:
        self._services, self._events, self._engines = services, services.events, services.engines
        self._lag, self._numbers = lag, itertools.count()

    @contextmanager
    def window(
        self,
        call: str,
        step: int,
        *,
        validate: bool = False,
        prompts: int = 0,
        trajectories: int = 0,
    ) -> Iterator[BatchWindow]:
        """A call runs in the block.

        Args:
            call: The method's name.
            step, validate, prompts, trajectories: As in `BatchStarted`.
        """
        events, batch = self._events, next(self._numbers)
        began, error = events.now(), ""
        if events.is_on:
            sizes = {"prompts": prompts, "trajectories": trajectories}
            events.emit(
                BatchStarted(
                    at=began, batch=batch, call=call, step=step, validate=validate, **sizes
                )
            )
        with self._lag.window() as lag, self._engines.load_window() as load:
            window = BatchWindow(self._engines, batch, anyio.current_time(), lag, load)
            try:
                yield window
            except BaseException as fault:
                error = format_error(fault)
                raise
            finally:
                if events.is_on:
                    now, metrics = events.now(), window.found
                    events.emit(
                        BatchEnded(at=now, batch=batch, began=began, error=error, metrics=metrics)
                    )

    async def sample(self) -> None:
        """Emit the runtime's counts every second, while events have a reader."""
        events, tally, engines = self._events, self._services.tally, self._engines
        while True:
            with self._lag.window() as lag:
                await anyio.sleep(SAMPLE_S)
            if not events.is_on:
                continue
            events.emit(
                RuntimeSampled(
                    at=events.now(),
                    admitted=tally.admitted,
                    running=tally.running,
                    finished=tally.finished,
                    waiting_requests=engines.waiting_requests,
                    generated_tokens=tally.generated_tokens + engines.tokens_under_way,
                    tool_calls=tally.tool_calls,
                    lag_s=lag.blocked_s or 0.0,
                    carried=tally.carried,
                )
            )


@attrs.frozen(kw_only=True)
class RuntimeStatistics:
    """A runtime now; admitted = finished + in flight.

    Attributes:
        admitted: Trajectories accepted since the start.
        running: Started, and not delivered yet; without those that wait for others of their group.
        carried: Started, and kept for the next call of `collect` or `stream_groups`.
        finished: With an outcome.
        outcomes: How many ended in which way.
        generated_tokens: Sampled tokens that have arrived.
        tool_calls: Calls answered, errors included.
        replicas: The engines.
        zombies: Cancelled requests whose end no engine has confirmed, over all of them.
        recoveries: What was done about requests whose replica was lost.
        unresponsive: Agents, tools, users, rewards and async sources that did not end within
            `limits.cleanup_s` of their cancellation and were given up; the log names each.
        abandoned_threads: Threads left behind at a deadline and still running, by the name of
            their tool, or ``rollout.chat`` where they work on a long text.
        max_running: Trajectories that may run at once now; 0 while admission is paused.
        journal: What became of the journal and of what it held; None where there is none.
        sandboxes: Those of trajectories; None where none was ever asked for.
        loop_lag_s: Longest delay of the event loop by what this process did, since the start.
        loop_starved_s: Longest delay because the machine did not run the loop's thread.
    """

    admitted: int
    running: int
    carried: int
    finished: int
    outcomes: dict[str, int]
    generated_tokens: int
    tool_calls: int
    replicas: tuple[ReplicaStatistics, ...]
    zombies: int
    recoveries: RecoveryCounts
    unresponsive: int
    abandoned_threads: dict[str, int]
    max_running: int
    loop_lag_s: float
    loop_starved_s: float
    journal: JournalStatistics | None = None
    sandboxes: PoolStatistics | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the replicas that do not serve now; `replicas` says why."""
        return find_missing(self.replicas)
