"""Opens the HTTP server of a runtime's trajectories, and closes it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs

from rollout.agents.gateway_door import GatewayAddress
from rollout.function_refs import refuse_while_imported
from rollout.gateway.http import serve_http
from rollout.gateway.routes import PREFIX, Router, TrajectoryApi
from rollout.gateway.sessions import Sessions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rollout.agents.context import AgentContext
    from rollout.agents.services import Services
    from rollout.config import GatewayConfig
    from rollout.gateway.routes import Route
    from rollout.runtime.runtime import RolloutRuntime


class Gateway:
    """Serves trajectories over HTTP; made by `open_gateway`, and a `GatewayDoor` of agents.

    Attributes:
        url: Where it listens, without a path.
    """

    def __init__(self, url: str, sessions: Sessions, config: GatewayConfig) -> None:
        self.url = url
        self._sessions = sessions
        self._config = config

    @asynccontextmanager
    async def open(self, context: AgentContext, **limits: Any) -> AsyncIterator[GatewayAddress]:
        """As `GatewayDoor.open`.

        Args:
            limits: Fields of `GatewayConfig`, for this trajectory.
        """
        config = attrs.evolve(self._config, **limits) if limits else self._config
        async with self._sessions.open(context, config) as session:
            root_url = f"{self.url}{PREFIX}/{session.path}"
            yield GatewayAddress(root_url=root_url, api_key=session.key, model=config.model)


def open_gateway(runtime: RolloutRuntime) -> AbstractAsyncContextManager[Gateway]:
    """A server through which agents that speak HTTP reach the trajectories of `runtime`.

    The `gateway` section of the runtime's configuration says how it serves. Agents find it while
    the block runs; leaving the block cuts its connections.

    Raises:
        ConfigError: A package of the extra `gateway` is not installed, or the address of
            `gateway.host` and `gateway.port` cannot be listened on.
    """
    refuse_while_imported("open_gateway")
    return serve_trajectories(runtime.services)


@asynccontextmanager
async def serve_trajectories(
    services: Services, routes: Sequence[Route] = ()
) -> AsyncIterator[Gateway]:
    """`open_gateway`, of what the trajectories of a runtime share.

    Args:
        services: Of the runtime.
        routes: Of paths that it serves beside those of trajectories.
    """
    config = services.config.gateway
    sessions = Sessions(config)
    api = TrajectoryApi(sessions, config, services.template.spell_token)
    async with serve_http(config, Router([*routes, *api.routes]).handle) as url:
        gateway = Gateway(url, sessions, config)
        before, services.gateway.door = services.gateway.door, gateway
        try:
            yield gateway
        finally:
            services.gateway.door = before
