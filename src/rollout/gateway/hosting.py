"""Where the server runs: on an asyncio loop in a thread of its own."""

from __future__ import annotations

import importlib
import socket
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from rollout.bridge import loop_poster
from rollout.errors import ConfigError
from rollout.lazy import importing
from rollout.scopes import open_task_group
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from rollout.config import GatewayConfig
    from rollout.gateway.asgi import Application

#: How long what is being answered has to end when the server does.
CLEANUP_S = 5.0
#: Connections that the system holds until they are accepted.
BACKLOG = 4096


class Host:
    """A server that is not running yet: its address is taken.

    Attributes:
        url: Where clients reach it, without a slash at its end.
    """

    def __init__(self, config: GatewayConfig, adapter: Any) -> None:
        self._config = config
        self._adapter = adapter
        self._listener = _listening(config)
        self.url = (config.public_url or _url_of(self._listener)).rstrip("/")

    @asynccontextmanager
    async def serving(
        self, routes: Iterable[tuple[str, Application]], default: Application
    ) -> AsyncIterator[None]:
        """Serve while the block runs; at its end no connection is left."""
        config, adapter = self._config, self._adapter
        limits = adapter.ConnectionLimits(
            max_connections=config.max_connections, head_s=config.head_s, idle_s=config.idle_s
        )
        application = adapter.router(routes, default)
        post, started = loop_poster(), anyio.Event()

        async def serve() -> None:
            async with adapter.serving(application, self._listener, limits):
                post(started.set)
                await anyio.sleep_forever()

        with closing(WorkerThreads(cleanup_s=CLEANUP_S)) as threads:
            async with open_task_group() as tasks:
                tasks.start_soon(partial(threads.run_asyncio, "gateway", serve, is_apart=True))
                await started.wait()
                yield

    def close(self) -> None:
        """Give the address back."""
        self._listener.close()


async def prepare(config: GatewayConfig, threads: WorkerThreads) -> Host:
    """A server with an address; the caller closes it.

    Raises:
        ConfigError: A package is missing, or the address cannot be listened on.
    """
    return Host(config, await threads.run("import", _adapter))


def _adapter() -> Any:
    try:
        with importing:
            return importlib.import_module("rollout.gateway.http_adapter")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the gateway needs the package {error.name}: pip install 'rollout-rl[gateway]'"
        ) from None


def _url_of(listener: socket.socket) -> str:
    """As this machine reaches it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listening(config: GatewayConfig) -> socket.socket:
    host, port = config.host, config.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"gateway.host = {host!r}, gateway.port = {port}: cannot listen there: {error}"
        ) from None
    listener.setblocking(False)
    return listener
