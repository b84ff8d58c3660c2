"""Who reads the events of a runtime: opened before its engines, closed after them."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from rollout.bridge import loop_clock
from rollout.config import RolloutConfig, dump_config
from rollout.observe.event_file import EventFile
from rollout.observe.events import RunEnded
from rollout.observe.prometheus import PrometheusEndpoint
from rollout.observe.traces import Tracer, open_tracer
from rollout.version import VERSION
from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.observe.event_stream import EventStream


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
    observe = config.observe
    async with AsyncExitStack() as stack:

        async def close(reader: EventFile | PrometheusEndpoint | Tracer) -> None:
            events.detach(reader)
            with anyio.CancelScope(shield=True):
                await run_in_thread(reader.close)

        if observe.path is not None:
            file = EventFile(observe.path)
            stack.push_async_callback(close, file)
            events.attach(file, needs_subjects=False)
        if observe.prometheus_port is not None:
            endpoint = PrometheusEndpoint(observe.prometheus_port)
            stack.push_async_callback(close, endpoint)
            events.attach(endpoint, needs_subjects=False)
        tracer = open_tracer(observe)
        if tracer is not None:
            stack.push_async_callback(close, tracer)
            events.attach(tracer, wants=tracer.wants, kinds=tracer.kinds)
        shown = dump_config(config) if events.is_on else {}
        events.start(loop_clock(), version=VERSION, run_seed=run_seed, config=shown)
        try:
            yield tracer
        finally:
            if events.is_on:
                events.emit(RunEnded(at=events.now()))
