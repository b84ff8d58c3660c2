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

#: How long a client may take to turn out to have left before it read which trajectory it got. Later
#: a connection breaks for other reasons, and others use the trajectory.
UNREAD_S = 5.0
_OPEN = msgspec.json.Decoder(OpenBody)
_FINISH = msgspec.json.Decoder(FinishBody)


@asynccontextmanager
async def open_trajectory_server(config: RolloutConfig, token: str) -> AsyncIterator[Gateway]:
    """A runtime of its own with a gateway where trajectories are opened over HTTP too.

    Args:
        config: Of the runtime.
        token: What trainers show; their agents get a key for each trajectory.

    Raises:
        RolloutError: As `open_rollout` and `open_gateway`.
    """
    async with (
        open_rollout(own_config(config)) as runtime,
        serve_runtime(runtime, token) as gateway,
    ):
        yield gateway


def own_config(config: RolloutConfig) -> RolloutConfig:
    """With a gateway that does not take the address before `serve_runtime` does."""
    return attrs.evolve(config, gateway=attrs.evolve(config.gateway, start="when_needed"))


@asynccontextmanager
async def serve_runtime(runtime: RolloutRuntime, token: str) -> AsyncIterator[Gateway]:
    """A gateway of a runtime, where trajectories are opened over HTTP; leaving ends them.

    Args:
        runtime: Opened with `own_config`.
        token: As for `open_trajectory_server`.

    Raises:
        ConfigError: As `open_gateway`.
    """
    async with open_task_group() as tasks:
        server = TrajectoryServer(runtime, tasks)
        routes = list_trainer_routes(server, TaskRunner(tasks), token)
        async with serve_trajectories(runtime.services, routes) as gateway:
            yield gateway


def list_trainer_routes(server: TrajectoryServer, runner: TaskRunner, token: str) -> list[Route]:
    """The paths of trainers, which show a token of their own."""

    def require_token(
        handle: Callable[[Exchange], Awaitable[None]],
    ) -> Callable[[Exchange], Awaitable[None]]:
        async def handle_authenticated(exchange: Exchange) -> None:
            key = exchange.key.encode("utf-8", "replace")
            if not hmac.compare_digest(key, token.encode()):
                raise GatewayError(401, "authentication", "the token is wrong")
            await handle(exchange)

        return handle_authenticated

    async def open_one(exchange: Exchange) -> None:
        exchange.require("POST")
        body = decode(_OPEN, await exchange.read_body())
        served_id = server.make_id()

        def abandon() -> None:
            runner.call_soon(partial(server.abandon, served_id))

        try:
            opened = await exchange.while_there(runner.run, lambda _: server.open(served_id, body))
            await exchange.reply_json(opened, 201)
        except BaseException:  # also a client that left while the answer was on its way
            abandon()
            raise
        exchange.on_unread(abandon, within_s=UNREAD_S)

    async def read_or_forget(exchange: Exchange) -> None:
        exchange.require("GET", "DELETE")
        act = server.read_state if exchange.method == "GET" else server.forget
        await reply(exchange, act, exchange.parameters["id"])

    async def finish(exchange: Exchange) -> None:
        exchange.require("POST")
        body = decode(_FINISH, await exchange.read_body() or b"{}")
        await reply(exchange, server.finish, exchange.parameters["id"], body)

    async def read_rows(exchange: Exchange) -> None:
        exchange.require("GET")
        await reply(exchange, server.read_rows, exchange.parameters["id"])

    async def reply(exchange: Exchange, act: Callable[..., Awaitable[Any]], *args: Any) -> None:
        await exchange.reply_json(await runner.run(lambda _: act(*args)))

    one = r"/trajectories/(?P<id>[^/]+)"
    return [
        Route("/trajectories", require_token(open_one)),
        Route(one, require_token(read_or_forget)),
        Route(f"{one}/finish", require_token(finish)),
        Route(f"{one}/rows", require_token(read_rows)),
    ]
