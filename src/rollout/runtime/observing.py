"""Who reads the events of a runtime: opened before its engines, closed after them."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import anyio

from rollout.bridge import loop_clock
from rollout.config import ObserveConfig, RolloutConfig, dump_config
from rollout.observe.event_file import EventFile
from rollout.observe.event_stream import Reader
from rollout.observe.events import RunEnded
from rollout.observe.prometheus import PrometheusEndpoint
from rollout.observe.traces import Tracer, open_tracer
from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from rollout.observe.event_stream import EventStream


class ClosableReader(Reader, Protocol):
    """A reader of ours."""

    def close(self) -> None:
        """The run is over; bounded."""


class Observers:
    """The readers that a configuration asks for.

    Attributes:
        readers: All of them.
        tracer: The one that traces, if any.

    Raises:
        RolloutError: The events cannot be written.
        ConfigError: A package is not installed, or a port is taken.
    """

    def __init__(self, observe: ObserveConfig) -> None:
        self.readers: list[ClosableReader] = []
        self.tracer: Tracer | None = None
        try:
            if observe.path is not None:
                self.readers.append(EventFile(observe.path))
            if observe.prometheus_port is not None:
                self.readers.append(PrometheusEndpoint(observe.prometheus_port))
            self.tracer = open_tracer(observe)
        except BaseException:
            for reader in self.readers:
                reader.close()
            raise
        if self.tracer is not None:
            self.readers.append(self.tracer)

    def decode_with(self, decode: Callable[[Sequence[int]], str]) -> None:
        """The tokenizer has been loaded."""
        if self.tracer is not None:
            self.tracer.decode = decode


@asynccontextmanager
async def observed(
    config: RolloutConfig, events: EventStream, run_seed: int
) -> AsyncIterator[Observers]:
    """The readers that the configuration asks for get the run's events, from first to last.

    Raises:
        RolloutError, ConfigError: As `Observers`.
    """
    observers = Observers(config.observe)
    for reader in observers.readers:
        if isinstance(reader, Tracer):
            events.attach(reader, wants=reader.wants, kinds=reader.kinds)
        else:
            events.attach(reader, needs_subjects=False)
    events.start(
        loop_clock(),
        version=sys.modules["rollout"].__version__,
        run_seed=run_seed,
        config=dump_config(config) if observers.readers else {},
    )
    try:
        yield observers
    finally:
        if events.is_on:
            events.emit(RunEnded(at=events.now()))
        with anyio.CancelScope(shield=True):
            for reader in observers.readers:
                events.detach(reader)
                await run_in_thread(reader.close)
