"""The routes of a gateway: from requests over HTTP to sessions and back."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout.clocks import wall
from rollout.gateway.apis import chat, messages, responses
from rollout.gateway.apis.writing import ApiRequest, ReplyContext, encode, format_openai_error
from rollout.gateway.calls import GatewayError, check_forced
from rollout.gateway.http import EVENTS, JSON, ClientLeftError, Exchange
from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from rollout.config import GatewayConfig
    from rollout.gateway.session import GatewaySession

    RequestReader = Callable[[bytes, Mapping[str, str]], ApiRequest]

logger = logging.getLogger("rollout.gateway")

#: Begins the paths of trajectories.
PREFIX = "/t"
#: A longer body is read in a thread: others wait for the loop.
LONG_BODY = 256 * 1024


class Route(NamedTuple):
    """What answers a path, and how an error of it looks.

    Attributes:
        pattern: Of the path; its groups are the parameters.
        methods: Those that it has; all where it names none.
        handle: Answers; what it raises becomes a reply.
        format_error: The body of an error.
    """

    pattern: str
    methods: tuple[str, ...]
    handle: Callable[[Exchange], Awaitable[None]]
    format_error: Callable[[GatewayError], Mapping[str, Any]] = format_openai_error


class Router:
    """Answers requests by the first route that fits their path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        routes = [*routes, Route(".*", (), refuse_path)]
        # Line feeds are characters of a path.
        self._routes = [(re.compile(each.pattern, re.DOTALL), each) for each in routes]

    async def handle(self, exchange: Exchange) -> None:
        """Answer a request.

        Raises:
            ClientLeftError: The client left before.
        """
        fitting = ((pattern.fullmatch(exchange.path), route) for pattern, route in self._routes)
        found, route = next((found, route) for found, route in fitting if found is not None)
        exchange.parameters = found.groupdict()
        try:
            if route.methods and exchange.method not in route.methods:
                message = f"method {exchange.method}: expected {' or '.join(route.methods)}"
                raise GatewayError(405, "method_not_allowed", message)
            await route.handle(exchange)
        except ClientLeftError:
            raise
        except Exception as error:
            if not isinstance(error, GatewayError):
                logger.exception("a %s request failed", exchange.method)
                error = GatewayError(500, "engine", "internal error")
            await exchange.reply_json(route.format_error(error), error.status)


async def refuse_path(_exchange: Exchange) -> None:
    """Answer a path that is none."""
    raise GatewayError(404, "not_found", "no such path is served here")


async def confirm(exchange: Exchange) -> None:
    """Tell that somebody is there."""
    await exchange.reply(b"", [])


class TrajectoryApi:
    """The paths below a trajectory's.

    Args:
        authenticate: Gives the session at a path, for who has its key.
        config: The section `gateway`.
        spell: The bytes of a token.
    """

    def __init__(
        self,
        authenticate: Callable[[str, str], GatewaySession],
        config: GatewayConfig,
        spell: Callable[[int], bytes],
    ) -> None:
        self._get_session = authenticate
        self._config = config
        self._models = (config.model, *config.model_aliases)
        self._spell = spell

    @property
    def routes(self) -> list[Route]:
        """All of them."""
        root = rf"{PREFIX}/(?P<path>[^/]+)"
        chat_path, responses_path = rf"{root}/v1/chat/completions", rf"{root}/v1/responses"
        messages_path, models_path = rf"{root}/v1/messages", rf"{root}/v1/models"
        post, get, of_messages = ("POST",), ("GET", "HEAD"), messages.format_error
        return [
            Route(chat_path, post, self._route(chat.read_request)),
            Route(responses_path, post, self._route(responses.read_request)),
            Route(messages_path, post, self._route(messages.read_request), of_messages),
            Route(f"{messages_path}/count_tokens", post, self._count, of_messages),
            Route(f"{messages_path}/.*", (), refuse_path, of_messages),
            Route(models_path, get, self._list_models),
            Route(rf"{models_path}/(?P<model>.+)", get, self._show_model),
            Route(rf"({root})?/?", get, confirm),
        ]

    def _authenticate(self, exchange: Exchange) -> GatewaySession:
        return self._get_session(exchange.parameters["path"], exchange.key)

    def _check_model(self, name: str) -> None:
        if name not in self._models:
            known = ", ".join(map(repr, self._models))
            message = f"model: {name!r} is not served here; expected {known}"
            raise GatewayError(404, "model_not_found", message, "model")

    async def _read(
        self, exchange: Exchange, read_request: RequestReader
    ) -> tuple[GatewaySession, ApiRequest]:
        session = self._authenticate(exchange)
        body = await exchange.read_body()
        read = partial(read_request, body, exchange.headers)
        request = await run_in_thread(read) if len(body) > LONG_BODY else read()
        if request.parsed.model is not None:
            self._check_model(request.parsed.model)
        return session, request

    def _route(self, read_request: RequestReader) -> Callable[[Exchange], Awaitable[None]]:
        """What answers requests for a generation in one of the APIs."""

        async def handle(exchange: Exchange) -> None:
            session, request = await self._read(exchange, read_request)
            check_forced(request.call, self._config.unenforced)
            context = ReplyContext(
                request.parsed.model or self._models[0], int(wall()), self._spell
            )
            try:
                await self._generate(exchange, session, request, context)
            except GatewayError as error:
                # In events, where the stream has begun or its client looks for it there.
                is_length = error.code == "context_length" and request.has_length_in_events
                if not request.parsed.stream or not (exchange.has_begun or is_length):
                    raise
                await exchange.reply(b"".join(request.format_failure(error, context)), EVENTS)

        return handle

    async def _generate(
        self,
        exchange: Exchange,
        session: GatewaySession,
        request: ApiRequest,
        context: ReplyContext,
    ) -> None:
        # White space before a JSON body says that an answer will come.
        sign, headers = (request.keep_alive, EVENTS) if request.parsed.stream else (b" ", JSON)
        wait = partial(exchange.wait, sign=sign, headers=headers)
        completion = await session.complete(request.call, wait)
        mark_lost = partial(session.mark_lost, completion.id)
        try:
            if request.parsed.stream:
                data = b"".join(request.format_events(completion, context))
            else:
                data = encode(request.format_body(completion, context))
            await exchange.reply(data, headers)
        except BaseException:
            mark_lost()
            raise
        exchange.on_unread(mark_lost)

    async def _count(self, exchange: Exchange) -> None:
        session, request = await self._read(exchange, messages.read_request)
        tokens = await session.count_tokens(request.call)
        await exchange.reply_json({"input_tokens": tokens})

    async def _list_models(self, exchange: Exchange) -> None:
        self._authenticate(exchange)
        served = [_format_model(name) for name in self._models]
        ends = {"first_id": served[0]["id"], "last_id": served[-1]["id"], "has_more": False}
        await exchange.reply_json({"object": "list", "data": served, **ends})

    async def _show_model(self, exchange: Exchange) -> None:
        self._authenticate(exchange)
        name = exchange.parameters["model"]
        self._check_model(name)
        await exchange.reply_json(_format_model(name))


def _format_model(name: str) -> dict[str, Any]:
    """What OpenAI's and Anthropic's clients want to know of a model, in one."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "rollout",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
