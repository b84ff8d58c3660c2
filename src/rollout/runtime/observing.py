"""Who reads the events of a runtime: opened before its engines, closed after them."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.to_thread

from rollout.bridge import has_virtual_clock, loop_clock
from rollout.config import RolloutConfig, dump_config
from rollout.observe.event_file import EventFile
from rollout.observe.event_stream import Reader
from rollout.observe.events import RunEnded
from rollout.observe.prometheus import PrometheusEndpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rollout.observe.event_stream import EventStream


@asynccontextmanager
async def observed(
    config: RolloutConfig, events: EventStream, run_seed: int
) -> AsyncIterator[None]:
    """The readers that the configuration asks for get the run's events, from first to last.

    Raises:
        RolloutError: The events cannot be written.
        ConfigError: A backend is not installed.
    """
    readers = [make(config) for make in _READERS]
    closing = [reader for reader in readers if reader is not None]
    for reader in closing:
        events.attach(reader)
    events.start(
        loop_clock(),
        version=sys.modules["rollout"].__version__,
        run_seed=run_seed,
        config=dump_config(config) if closing else {},
    )
    try:
        yield
    finally:
        if events.is_on:
            events.emit(RunEnded(at=events.now()))
        with anyio.CancelScope(shield=True):
            for reader in closing:
                events.detach(reader)
                await _beside_loop(reader.close)


class ClosableReader(Reader, Protocol):
    """A reader of ours."""

    def close(self) -> None:
        """The run is over; bounded."""


def _event_file(config: RolloutConfig) -> EventFile | None:
    path = config.observe.path
    return None if path is None else EventFile(path)


def _prometheus(config: RolloutConfig) -> PrometheusEndpoint | None:
    port = config.observe.prometheus_port
    return None if port is None else PrometheusEndpoint(port)


_READERS: tuple[Callable[[RolloutConfig], ClosableReader | None], ...] = (
    _event_file,
    _prometheus,
)


async def _beside_loop(close: Callable[[], None]) -> None:
    if has_virtual_clock():  # time would run away from a thread
        close()
    else:
        await anyio.to_thread.run_sync(close)
