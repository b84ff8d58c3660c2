"""Engines on the driver's own event loop, behind the same frames."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from rollout.engine.channel.core_hosting import describe_error, load_core, watch_core
from rollout.engine.channel.server import EngineServer
from rollout.engine.core import CORE_CLOSE_S, EngineCore
from rollout.engine.placement.memory import MemoryByteStream, memory_stream_pair
from rollout.engine.placement.placement import CoreSpec, ReplicaHandle
from rollout.errors import EngineError
from rollout.limits import cleanup_scope
from rollout.scopes import find_propagating, open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from anyio.abc import ByteStream

logger = logging.getLogger("rollout.engine")

Wrap = Callable[[str, EngineCore], EngineCore]


class InProcess:
    """The placement `in_process`.

    Args:
        latency_s: One way, for every byte.
        max_read: Longest read, to exercise short reads; None for no bound.
        wrap: What is served in the place of each core, given the replica's name; None: itself.
    """

    def __init__(
        self, *, latency_s: float = 0.0, max_read: int | None = None, wrap: Wrap | None = None
    ) -> None:
        self._wrap: Wrap = wrap or (lambda _, core: core)
        self._latency_s = latency_s
        self._max_read = max_read

    @asynccontextmanager
    async def open_replica(
        self, name: str, spec: CoreSpec, start_timeout_s: float
    ) -> AsyncIterator[ReplicaHandle]:
        """See `Placement.open_replica`."""
        secret = secrets.token_bytes(32)
        died, frozen = anyio.Event(), anyio.Event()
        streams: set[MemoryByteStream] = set()

        def die() -> None:
            died.set()
            for stream in streams:
                stream.cut()

        def freeze() -> None:
            frozen.set()
            for stream in streams:
                stream.stall()

        async with open_task_group() as tasks:
            core: Any = await self._start_core(name, spec, start_timeout_s)
            for hook, act in (("on_death", die), ("on_freeze", freeze)):
                if hasattr(core, hook):
                    setattr(core, hook, act)
            server = EngineServer(core, secret)

            async def run_guarded(code: Callable[[], Awaitable[object]]) -> None:
                try:
                    await code()
                except BaseException as error:
                    if find_propagating(error) is not None:
                        raise
                    logger.error("%s: its core failed; it is lost", name, exc_info=error)
                    die()  # as a process of its own would

            async def serve(stream: MemoryByteStream) -> None:
                streams.add(stream)
                try:
                    await run_guarded(partial(server.serve_connection, stream))
                finally:
                    streams.discard(stream)

            async def connect() -> ByteStream:
                if died.is_set():
                    raise anyio.BrokenResourceError
                ours, theirs = memory_stream_pair(self._latency_s, self._max_read)
                if frozen.is_set():
                    theirs.stall()
                tasks.start_soon(serve, theirs)
                return ours

            tasks.start_soon(run_guarded, partial(watch_core, core, die))
            try:
                yield ReplicaHandle(connect, secret, died)
            finally:
                server.cancel_operation()
                with cleanup_scope(CORE_CLOSE_S):
                    await run_guarded(core.aclose)

    async def release(self, name: str) -> None:
        """Nothing is kept."""

    async def _start_core(self, name: str, spec: CoreSpec, start_timeout_s: float) -> EngineCore:
        try:
            core = self._wrap(name, load_core(spec.core)(**spec.options))
            with anyio.fail_after(start_timeout_s):
                await core.start()
        except TimeoutError:
            reason = f"not ready after engine.start_timeout_s = {start_timeout_s:g} s"
            raise EngineError(f"{name}: {reason}") from None
        except Exception as error:
            raise EngineError(f"{name}: {describe_error(error)}") from error
        return core
