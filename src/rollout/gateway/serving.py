"""A runtime as a server: trainers open trajectories over HTTP, and agents reach them."""

from __future__ import annotations

import hmac
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from rollout.gateway.apis.reading import decode
from rollout.gateway.calls import GatewayError
from rollout.gateway.gateway import serve_trajectories
from rollout.gateway.routes import Route
from rollout.gateway.served_trajectories import FinishBody, OpenBody, TrajectoryServer
from rollout.gateway.task_runner import TaskRunner
from rollout.runtime.opening import open_rollout
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from rollout.config import RolloutConfig
    from rollout.gateway.gateway import Gateway
    from rollout.gateway.http import Exchange
    from rollout.runtime.runtime import RolloutRuntime

_OPEN = msgspec.json.Decoder(OpenBody)
_FINISH = msgspec.json.Decoder(FinishBody)


@asynccontextmanager
async def open_trajectory_server(
    config: RolloutConfig, token: str
) -> AsyncIterator[tuple[RolloutRuntime, Gateway]]:
    """A runtime with a gateway where trajectories are opened over HTTP; leaving ends them.

    Args:
        config: Of the runtime.
        token: What trainers show; their agents get a key for each trajectory.

    Raises:
        RolloutError: As `open_rollout` and `open_gateway`.
    """
    # The runtime's own gateway must not take the address before.
    own = attrs.evolve(config, gateway=attrs.evolve(config.gateway, start="when_needed"))
    async with open_rollout(own) as runtime, open_task_group() as tasks:
        server = TrajectoryServer(runtime, tasks)
        routes = list_trainer_routes(server, TaskRunner(tasks), token)
        async with serve_trajectories(runtime.services, routes) as gateway:
            yield runtime, gateway


def list_trainer_routes(server: TrajectoryServer, runner: TaskRunner, token: str) -> list[Route]:
    """The paths of trainers, which show a token of their own."""

    def make_route(
        pattern: str, methods: tuple[str, ...], handle: Callable[[Exchange], Awaitable[None]]
    ) -> Route:
        async def handle_authenticated(exchange: Exchange) -> None:
            key = exchange.key.encode("utf-8", "replace")
            if not hmac.compare_digest(key, token.encode()):
                raise GatewayError(401, "authentication", "the token is wrong")
            await handle(exchange)

        return Route(pattern, methods, handle_authenticated)

    async def open_one(exchange: Exchange) -> None:
        body = decode(_OPEN, await exchange.read_body())
        served_id = server.make_id()

        def abandon() -> None:
            runner.call_soon(partial(server.abandon, served_id))

        try:
            opened = await runner.run(lambda _: server.open(served_id, body), wait=exchange.wait)
            await exchange.reply_json(opened, 201)
        except BaseException:  # also a client that left while the answer was on its way
            abandon()
            raise
        exchange.on_unread(abandon)

    async def read_or_forget(exchange: Exchange) -> None:
        await reply(exchange, server.read_state if exchange.method == "GET" else server.forget)

    async def finish(exchange: Exchange) -> None:
        body = decode(_FINISH, await exchange.read_body() or b"{}")
        await reply(exchange, server.finish, body)

    async def read_rows(exchange: Exchange) -> None:
        await reply(exchange, server.read_rows)

    async def reply(exchange: Exchange, act: Callable[..., Awaitable[Any]], *args: Any) -> None:
        served_id = exchange.parameters["id"]
        await exchange.reply_json(await runner.run(lambda _: act(served_id, *args)))

    one = r"/trajectories/(?P<id>[^/]+)"
    return [
        make_route("/trajectories", ("POST",), open_one),
        make_route(one, ("GET", "DELETE"), read_or_forget),
        make_route(f"{one}/finish", ("POST",), finish),
        make_route(f"{one}/rows", ("GET",), read_rows),
    ]
