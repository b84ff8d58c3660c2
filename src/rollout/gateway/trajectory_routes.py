"""The routes of trainers in other processes or languages, behind a token of their own."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.gateway.apis.reading import decoded
from rollout.gateway.apis.writing import openai_error
from rollout.gateway.asgi import Exchange, ExchangeLimits
from rollout.gateway.calls import GatewayError
from rollout.gateway.served_trajectories import Desk, Finish, Opening, new_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollout.gateway.asgi import Application, Receive, Scope, Send
    from rollout.gateway.runtime_loop import RuntimeLoop

ROOT = "/trajectories"
#: How long a client may take to turn out to have left before it read which trajectory it got. Later
#: a connection breaks for other reasons, and others use the trajectory.
UNREAD_S = 5.0
_OPENING = msgspec.json.Decoder(Opening)
_FINISH = msgspec.json.Decoder(Finish)


class TrajectoryRoutes:
    """Handles requests for trajectories, each with the token."""

    def __init__(self, desk: Desk, loop: RuntimeLoop, limits: ExchangeLimits, token: str) -> None:
        self._desk = desk
        self._loop = loop
        self._limits = limits
        self._token = token.encode()

    def table(self) -> list[tuple[str, Application]]:
        """Paths and what answers them."""
        return [
            (ROOT, self._route(self._open)),
            (f"{ROOT}/{{id}}", self._route(self._look)),
            (f"{ROOT}/{{id}}/finish", self._route(self._finish)),
            (f"{ROOT}/{{id}}/rows", self._route(self._rows)),
        ]

    def _route(self, handle: Callable[[Exchange], Awaitable[None]]) -> Application:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            exchange = Exchange(scope, receive, send, self._limits)

            async def authenticated() -> None:
                if not hmac.compare_digest(exchange.key().encode("utf-8", "replace"), self._token):
                    raise GatewayError(401, "authentication", "the token is wrong")
                await handle(exchange)

            async def refuse(error: GatewayError) -> None:
                await exchange.reply_json(openai_error(error), error.status)

            await exchange.answer(authenticated, refuse)

        return application

    async def _open(self, exchange: Exchange) -> None:
        exchange.require("POST")
        asked = decoded(_OPENING, await exchange.body())
        served_id = new_id()

        def abandon() -> None:
            self._loop.post(self._desk.abandon, served_id)

        try:
            opened = await exchange.while_there(self._loop.run, self._desk.open, served_id, asked)
            await exchange.reply_json(opened, 201)
        except BaseException:  # also a client that left while the answer was on its way
            abandon()
            raise
        exchange.if_unread(abandon, within_s=UNREAD_S)

    async def _look(self, exchange: Exchange) -> None:
        exchange.require("GET", "DELETE")
        look = self._desk.state if exchange.method == "GET" else self._desk.forget
        await self._answer(exchange, look)

    async def _finish(self, exchange: Exchange) -> None:
        exchange.require("POST")
        asked = decoded(_FINISH, await exchange.body() or b"{}")
        told = await self._loop.run(self._desk.finish, exchange.parameters["id"], asked)
        await exchange.reply_json(told)

    async def _rows(self, exchange: Exchange) -> None:
        exchange.require("GET")
        await self._answer(exchange, self._desk.rows)

    async def _answer(self, exchange: Exchange, look: Callable[[str], dict[str, Any]]) -> None:
        async def looked() -> dict[str, Any]:
            return look(exchange.parameters["id"])

        await exchange.reply_json(await self._loop.run(looked))
