"""Opens the HTTP server of a runtime's trajectories, and closes it."""

from __future__ import annotations

import math
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from typing import TYPE_CHECKING, Any

import attrs

from rollout.agents.gateway_door import GatewayAddress
from rollout.function_refs import refuse_while_imported
from rollout.gateway.asgi import ExchangeLimits
from rollout.gateway.hosting import prepare
from rollout.gateway.runtime_loop import open_runtime_loop
from rollout.gateway.server import PREFIX, Service, not_found, routes
from rollout.gateway.sessions import GatewaySettings, Sessions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from rollout.agents.context import AgentContext
    from rollout.agents.services import Services
    from rollout.config import GatewayConfig, LimitsConfig
    from rollout.gateway.asgi import Application
    from rollout.gateway.runtime_loop import RuntimeLoop
    from rollout.runtime.runtime import RolloutRuntime


class Gateway:
    """Serves trajectories over HTTP; made by `open_gateway`, and a `GatewayDoor` of agents.

    Attributes:
        url: Where it listens, without a path.
    """

    def __init__(self, url: str, sessions: Sessions, settings: GatewaySettings) -> None:
        self.url = url
        self._sessions = sessions
        self._settings = settings

    @asynccontextmanager
    async def open(self, context: AgentContext, **limits: Any) -> AsyncIterator[GatewayAddress]:
        """As `GatewayDoor.open`.

        Args:
            limits: Fields of `GatewaySettings`, for this trajectory.
        """
        settings = attrs.evolve(self._settings, **limits)
        async with self._sessions.open(context, settings) as session:
            root_url = f"{self.url}{PREFIX}/{session.path}"
            yield GatewayAddress(root_url=root_url, api_key=session.key, model=self._settings.model)


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
    services: Services,
    more_routes: Callable[[RuntimeLoop], Iterable[tuple[str, Application]]] | None = None,
) -> AsyncIterator[Gateway]:
    """`open_gateway`, of what the trajectories of a runtime share.

    Args:
        more_routes: Of paths that it serves beside those of trajectories, given the loop on which
            the runtime runs.
    """
    config = services.config.gateway
    host = await prepare(config, services.threads)
    with closing(host):
        settings = GatewaySettings.of(config)
        sessions = Sessions(settings)
        gateway = Gateway(host.url, sessions, settings)
        async with open_runtime_loop() as loop:
            service = _service(services, sessions, loop)
            table = [*(more_routes(loop) if more_routes else ()), *routes(service)]
            async with host.serving(table, not_found(service)):
                before, services.gateway.door = services.gateway.door, gateway
                try:
                    yield gateway
                finally:
                    services.gateway.door = before


def exchange_limits(config: GatewayConfig) -> ExchangeLimits:
    """The bounds on requests and replies that a configuration sets."""
    return ExchangeLimits(
        max_body_bytes=config.max_body_bytes, body_s=config.body_s, write_s=config.write_s
    )


def _service(services: Services, sessions: Sessions, loop: RuntimeLoop) -> Service:
    config = services.config.gateway
    return Service(
        sessions=sessions,
        loop=loop,
        limits=exchange_limits(config),
        models=(config.model, *config.model_aliases),
        spell=services.template.spell_token,
        keep_alive_s=config.keep_alive_s,
        unenforced=config.unenforced,
        begin_s=_begin_s(services.config.limits),
    )


def _begin_s(limits: LimitsConfig) -> float:
    """The shortest limit that a generation is under."""
    bounds = (limits.generation_s, limits.turn_s, limits.trajectory_s)
    return min((bound for bound in bounds if bound is not None), default=math.inf)
