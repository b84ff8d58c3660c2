"""Opens the HTTP server of a runtime's trajectories, and closes it."""

from __future__ import annotations

import hmac
import secrets
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs

from rollout.agents.services import GatewayAddress
from rollout.gateway.calls import GatewayError, refuse_ended
from rollout.gateway.http import serve_http
from rollout.gateway.routes import PREFIX, Router, TrajectoryApi
from rollout.gateway.session import GatewaySession, open_session
from rollout.user_code import refuse_while_imported

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rollout.agents.context import AgentContext
    from rollout.agents.services import Services
    from rollout.config import GatewayConfig
    from rollout.gateway.routes import Route
    from rollout.runtime.runtime import RolloutRuntime


#: Begins a key; hexadecimal digits and the path that it opens follow.
_SK, _DIGITS = "sk-", 64


class Gateway:
    """Serves trajectories over HTTP; made by `open_gateway`, and a `TrajectoryGateway` of agents.

    A key is a signature of its trajectory's path, so that nothing of one that has ended is kept to
    know it.

    Attributes:
        url: Where it listens, without a path.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.url = ""
        self._config = config
        self._secret = secrets.token_bytes(32)
        self._running: dict[str, GatewaySession] = {}

    @asynccontextmanager
    async def open(self, context: AgentContext, **limits: Any) -> AsyncIterator[GatewayAddress]:
        """As `TrajectoryGateway.open`.

        Args:
            context: The trajectory's.
            limits: Fields of `GatewayConfig`, for this trajectory; they count where they are lower.

        Raises:
            Exception: As `open_session`.
        """
        own = {name: getattr(self._config, name) for name in limits}
        lower = {n: most for n, most in limits.items() if own[n] is None or most < own[n]}
        config = attrs.evolve(self._config, **lower) if lower else self._config
        path = secrets.token_urlsafe(12)
        root_url = f"{self.url}{PREFIX}/{path}"
        try:
            async with open_session(context, config, path) as self._running[path]:
                yield GatewayAddress(
                    root_url=root_url, api_key=self._sign(path), model=config.model
                )
        finally:
            self._running.pop(path, None)

    def authenticate(self, path: str, key: str) -> GatewaySession:
        """The session at a path, for who has its key; from any thread.

        Raises:
            GatewayError: There is none (404), it has ended (403), the key is wrong (401) or that of
                another one (403).
        """
        session = self._running.get(path)
        own = key[len(_SK) + _DIGITS :]
        is_ours = hmac.compare_digest(_encode(key), _encode(self._sign(own)))
        if session is None and not (is_ours and own == path):
            raise GatewayError(404, "not_found", "there is no such trajectory")
        if not is_ours:
            raise GatewayError(401, "authentication", "the key is wrong")
        if own != path:
            raise GatewayError(403, "permission", "the key is that of another trajectory")
        if session is None:
            raise refuse_ended()
        return session

    def _sign(self, path: str) -> str:
        return f"{_SK}{hmac.digest(self._secret, _encode(path), 'sha256').hex()}{path}"


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


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
    gateway = Gateway(config)
    api = TrajectoryApi(gateway.authenticate, config, services.template.spell_token)
    async with serve_http(config, Router([*routes, *api.routes]).handle) as gateway.url:
        before, services.gateway = services.gateway, gateway
        try:
            yield gateway
        finally:
            services.gateway = before
