"""Requests and replies over ASGI: bodies within bounds, and clients that leave."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeVar

import anyio
import attrs

from rollout.gateway.apis.writing import encode
from rollout.gateway.calls import GatewayError

T = TypeVar("T")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

logger = logging.getLogger("rollout.gateway")

JSON: Headers = [(b"content-type", b"application/json")]
EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
#: Official clients obey it, whatever the status.
FINAL: Headers = [(b"x-should-retry", b"false")]


class ClientLeftError(Exception):
    """The client is gone; there is nobody to answer."""


@attrs.frozen(kw_only=True)
class ExchangeLimits:
    """Bounds on one request and its reply; see `GatewayConfig`."""

    max_body_bytes: int
    body_s: float
    write_s: float


class Exchange:
    """One request and its reply, on a connection of `http_adapter`.

    Attributes:
        headers: By their names in lower case.
        parameters: Of the path.
        has_begun: Whether a part of the reply is sent.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: ExchangeLimits) -> None:
        self.method: str = scope["method"]
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.parameters: Mapping[str, str] = scope.get("path_params", {})
        self.has_begun = False
        # Taken out: the connection keeps the scope.
        self._connection: Any = scope.pop("rollout.connection")
        self._receive = receive
        self._send = send
        self._limits = limits

    async def answer(
        self,
        handle: Callable[[], Awaitable[None]],
        refuse: Callable[[GatewayError], Awaitable[None]],
    ) -> None:
        """Have it handled; what is raised is refused."""
        try:
            try:
                await handle()
            except ClientLeftError:
                raise
            except GatewayError as error:
                await refuse(error)
            except Exception:
                logger.exception("a %s request failed", self.method)
                await refuse(GatewayError(500, "engine", "internal error"))
        except ClientLeftError:
            self._connection.leave_unanswered()

    def key(self) -> str:
        """What the client shows to be let in; "" where it shows nothing."""
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token.strip():
            return token.strip()
        return self.headers.get("x-api-key", "")

    def require(self, *methods: str) -> None:
        """Refuse other methods.

        Raises:
            GatewayError: It is one.
        """
        if self.method not in methods:
            expected = " or ".join(methods)
            message = f"method {self.method}: expected {expected}"
            raise GatewayError(405, "method_not_allowed", message)

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            GatewayError: It is longer than `max_body_bytes`, encoded, or comes too slowly.
            ClientLeftError: It never came whole.
        """
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            message = f"content-encoding {encoding!r}: not served; expected none"
            raise GatewayError(400, "invalid_request", message)
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._limits.max_body_bytes:
            raise self._too_large()
        if self._connection.has_whole_request:  # as a rule: there is nothing to wait for
            return await self._whole_body()
        with anyio.move_on_after(self._limits.body_s):
            return await self._whole_body()
        limit = f"gateway.body_s = {self._limits.body_s:g}"
        raise GatewayError(400, "invalid_request", f"the body took longer than {limit}")

    async def _whole_body(self) -> bytes:
        more, parts = True, list[bytes]()
        size = 0
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            body, more = message.get("body", b""), message.get("more_body", False)
            size += len(body)
            if size > self._limits.max_body_bytes:
                raise self._too_large()
            parts.append(body)
        return b"".join(parts)

    def _too_large(self) -> GatewayError:
        limit = f"gateway.max_body_bytes = {self._limits.max_body_bytes}"
        return GatewayError(413, "too_large", f"the body is longer than {limit}")

    async def while_there(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """``await function(*args)``, which a client that leaves cancels.

        Raises:
            ClientLeftError: It left.
        """
        with anyio.CancelScope() as scope:  # cheaper than a task that waits for the client
            self._connection.on_leave(scope.cancel)
            return await function(*args)
        raise ClientLeftError

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head of the reply."""
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Send a part of the reply.

        Raises:
            ClientLeftError: The client takes nothing, or is gone.
        """
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        await self._flush()

    async def end(self, data: bytes) -> None:
        """Send the last part; the client was there when the system took the last byte.

        Raises:
            ClientLeftError: It was not.
        """
        await self._send({"type": "http.response.body", "body": data})
        await self._flush()

    async def _flush(self) -> None:
        if not await self._connection.flush(self._limits.write_s):
            raise ClientLeftError

    def if_unread(self, callback: Callable[[], object], *, within_s: float = math.inf) -> None:
        """Call it where the client turns out to have left before it read the whole reply.

        Args:
            within_s: What shows later than in so many seconds counts no more.
        """
        clock = self._connection.loop.time
        until = clock() + within_s
        self._connection.if_unread(lambda: clock() < until and callback())

    async def reply(self, data: bytes, headers: Headers = JSON, status: int = 200) -> None:
        """Send a whole reply.

        Raises:
            ClientLeftError: The client was gone before its last byte.
        """
        await self.begin(status, [*headers, (b"content-length", b"%d" % len(data))])
        await self.end(data)

    async def reply_json(self, value: Any, status: int = 200) -> None:
        """Send a whole reply of JSON; errors are final."""
        headers = JSON if status < 400 else JSON + FINAL
        await self.reply(encode(value), headers, status)
