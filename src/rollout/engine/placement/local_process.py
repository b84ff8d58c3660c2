"""Engines in child processes behind loopback sockets."""

from __future__ import annotations

import logging
import math
import secrets
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from rollout.engine.channel.sockets import connect_engine
from rollout.engine.placement.engine_process import EngineProcess, encode_spec
from rollout.engine.placement.placement import CoreSpec, ReplicaHandle
from rollout.errors import EngineError
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

logger = logging.getLogger("rollout.engine")


class LocalProcess:
    """The placement `local_process`.

    Args:
        python: Interpreter of the children; None takes this one, with its module search path.
    """

    def __init__(self, *, python: str | None = None) -> None:
        self._python = python

    @asynccontextmanager
    async def open_replica(
        self, name: str, spec: CoreSpec, start_timeout_s: float
    ) -> AsyncIterator[ReplicaHandle]:
        """See `Placement.open_replica`."""
        secret, died = secrets.token_bytes(32), anyio.Event()
        process = EngineProcess(partial(logger.info, "%s: %s", name))
        line = encode_spec(spec, secret, with_sys_path=self._python is None)
        threads = anyio.CapacityLimiter(math.inf)

        async def run(method: Callable[..., Any], *args: Any) -> Any:
            return await to_thread.run_sync(method, *args, abandon_on_cancel=True, limiter=threads)

        async def watch() -> None:
            await run(process.wait)
            died.set()

        try:
            try:
                with anyio.fail_after(start_timeout_s):
                    ready = await run(process.start, line, self._python)
            except TimeoutError:
                reason = f"not ready after engine.start_timeout_s = {start_timeout_s:g} s"
                raise EngineError(f"{name}: {reason}") from None
            if ready.error:
                raise EngineError(f"{name}: {ready.error}")
            connect = partial(connect_engine, "127.0.0.1", ready.port, spec.tls)
            async with open_task_group() as tasks:
                tasks.start_soon(watch)
                yield ReplicaHandle(connect, secret, died)
        finally:
            with anyio.CancelScope(shield=True):
                await run(process.stop)

    async def release(self, name: str) -> None:
        """Nothing is kept."""
