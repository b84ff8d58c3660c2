"""The gateway of a runtime: opened with it, or once an agent asks for it.

It is a floor above, and found by its name.
"""

from __future__ import annotations

import importlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from rollout.agents.agent_loop import find_class, get_agent
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.agents.context import AgentContext
    from rollout.agents.services import GatewayAddress, Services

HOME = "rollout.gateway.gateway"


class GatewayOnDemand:
    """A `TrajectoryGateway` whose server starts when the first agent comes.

    It runs in a task of the runtime's: what its handlers do belongs to no trajectory.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._is_wanted, self._is_settled = anyio.Event(), anyio.Event()
        self._gateway: Any = None
        self._fault: Exception | None = None

    @asynccontextmanager
    async def open(self, context: AgentContext) -> AsyncIterator[GatewayAddress]:
        """As `TrajectoryGateway.open`; raises what `start` does."""
        await self.start()
        async with self._gateway.open(context) as address:
            yield address

    async def start(self) -> None:
        """Start the server, or wait until it serves.

        Raises:
            ConfigError: It cannot be opened; or whatever else its start raised.
        """
        self._is_wanted.set()
        await self._is_settled.wait()
        if self._fault is not None:
            raise self._fault

    async def serve(self) -> None:
        """Serve from the first `start` until this is cancelled; that raises what stops it."""
        await self._is_wanted.wait()
        services = self._services
        try:
            module = await services.threads.run("import", importlib.import_module, HOME)
            async with module.serve_trajectories(services) as self._gateway:
                services.gateway = self  # agents keep to it
                self._is_settled.set()
                await anyio.sleep_forever()
        except Exception as error:
            if self._is_settled.is_set():
                raise
            self._fault = error
            self._is_settled.set()


@asynccontextmanager
async def serve_gateway(services: Services) -> AsyncIterator[None]:
    """Have agents find a gateway while the block runs.

    Raises:
        ConfigError: `gateway.start` or the configured agent wants it at once, and it cannot be
            opened.
    """
    config = services.config
    gateway = services.gateway = GatewayOnDemand(services)
    async with open_task_group() as tasks:
        tasks.start_soon(gateway.serve)
        agent = find_class(get_agent(config.agent.name))
        if config.gateway.start == "always" or agent.needs_gateway:
            await gateway.start()
        yield
