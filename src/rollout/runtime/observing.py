"""Who reads the events of a runtime: opened before its engines, closed after them."""

from __future__ import annotations

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
from rollout.version import VERSION
from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.observe.event_stream import EventStream


class ClosableReader(Reader, Protocol):
    """A reader of ours."""

    def close(self) -> None:
        """The run is over; bounded."""


def _open_readers(observe: ObserveConfig) -> list[ClosableReader]:
    readers: list[ClosableReader] = []
    try:
        if observe.path is not None:
            readers.append(EventFile(observe.path))
        if observe.prometheus_port is not None:
            readers.append(PrometheusEndpoint(observe.prometheus_port))
        tracer = open_tracer(observe)
        if tracer is not None:
            readers.append(tracer)
    except BaseException:
        for reader in readers:
            reader.close()
        raise
    return readers


@asynccontextmanager
async def open_observers(
    config: RolloutConfig, events: EventStream, run_seed: int
) -> AsyncIterator[Tracer | None]:
    """The readers that the configuration asks for get the run's events, from first to last.

    Yields the one that traces, whose `decode` is to be set once the tokenizer has been loaded.

    Raises:
        RolloutError: The events cannot be written.
        ConfigError: A package is not installed, or a port is taken.
    """
    readers = _open_readers(config.observe)
    tracer = next((reader for reader in readers if isinstance(reader, Tracer)), None)
    for reader in readers:
        if isinstance(reader, Tracer):
            events.attach(reader, wants=reader.wants, kinds=reader.kinds)
        else:
            events.attach(reader, needs_subjects=False)
    events.start(
        loop_clock(),
        version=VERSION,
        run_seed=run_seed,
        config=dump_config(config) if readers else {},
    )
    try:
        yield tracer
    finally:
        if events.is_on:
            events.emit(RunEnded(at=events.now()))
        with anyio.CancelScope(shield=True):
            for reader in readers:
                events.detach(reader)
                await run_in_thread(reader.close)
