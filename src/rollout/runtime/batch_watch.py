"""The calls of a runtime, numbered, told of, and measured while they run."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import attrs

from rollout.engine.driver.load_windows import LoadWindow
from rollout.engine.driver.pool import EnginePool
from rollout.observe.events import BatchEnded, BatchStarted, RuntimeSampled
from rollout.observe.loop_lag import LagWindow
from rollout.types import said

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.observe.event_stream import EventStream
    from rollout.observe.loop_lag import LoopLag
    from rollout.observe.tally import Tally

#: How often the counts of a runtime are told.
SAMPLE_S = 1.0


@attrs.define(eq=False)
class BatchWindow:
    """What was measured while a call ran.

    Attributes:
        batch: The call's number.
        found: The metrics of its batch, once they are known.
    """

    batch: int
    _engines: EnginePool
    _began: float
    _lag: LagWindow
    _load: LoadWindow
    found: dict[str, float] = attrs.field(factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """By the names that they have in `RolloutBatch.metrics`."""
        version = {"weights/version": float(self._engines.weight_version)}
        if self.batch < 0:  # what it measured is how long tensors took, not trajectories
            return version
        return {
            **version,
            "batch_s": anyio.current_time() - self._began,
            **self._lag.metrics,
            **self._load.metrics,
        }


class BatchWatch:
    """Numbers the calls of a runtime, and measures what happens meanwhile.

    Attributes:
        lag: Of the event loop.
    """

    def __init__(
        self, events: EventStream, engines: EnginePool, lag: LoopLag, tally: Tally
    ) -> None:
        self.lag = lag
        self._events, self._engines, self._tally = events, engines, tally
        self._numbers = itertools.count()

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
        events, batch, error = self._events, next(self._numbers), ""
        began = events.now()
        if events.is_on:
            events.emit(
                BatchStarted(
                    at=began,
                    batch=batch,
                    call=call,
                    step=step,
                    validate=validate,
                    prompts=prompts,
                    trajectories=trajectories,
                )
            )
        with self.measured(batch) as window:
            try:
                yield window
            except BaseException as fault:
                error = said(fault)
                raise
            finally:
                if events.is_on:
                    events.emit(
                        BatchEnded(
                            at=events.now(),
                            batch=batch,
                            began=began,
                            error=error,
                            metrics=window.found,
                        )
                    )

    @contextmanager
    def measured(self, batch: int = -1) -> Iterator[BatchWindow]:
        """What is measured while the block runs; of no call where it has no number."""
        engines = self._engines
        with self.lag.window() as lag, engines.load_windows.window() as load:
            yield BatchWindow(batch, engines, anyio.current_time(), lag, load)

    async def sample(self) -> None:
        """Tell the runtime's counts now and then, while somebody reads."""
        events, tally, engines = self._events, self._tally, self._engines
        while events.is_on:
            with self.lag.window() as lag:
                await anyio.sleep(SAMPLE_S)
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
