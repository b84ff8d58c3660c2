"""The routes of a trajectory: from requests over HTTP to its session and back."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

import anyio
import attrs

from rollout.clocks import wall
from rollout.errors import AgentError
from rollout.gateway.apis import chat, messages, responses
from rollout.gateway.apis.writing import ApiRequest, Teller, encode, openai_error
from rollout.gateway.asgi import EVENTS, JSON, Exchange, ExchangeLimits
from rollout.gateway.calls import Completion, GatewayCall, GatewayError, check_forced
from rollout.gateway.runtime_loop import LoopBlockedError, RuntimeLoop
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from rollout.gateway.asgi import Application, Receive, Scope, Send

logger = logging.getLogger("rollout.gateway")

#: Begins the paths of trajectories.
PREFIX = "/t"


class Session(Protocol):
    """What of a trajectory's session its routes use; see `sessions.GatewaySession`."""

    @property
    def activity(self) -> str: ...

    async def complete(self, call: GatewayCall) -> Completion: ...

    async def count_tokens(self, call: GatewayCall) -> int: ...

    def delivered(self, completion_id: str) -> None: ...

    def left(self, completion_id: str) -> None: ...

    def fail(self, error: Exception) -> None: ...


class SessionFinder(Protocol):
    """Finds the session that a path and a key name; called in the loop that serves."""

    def authenticate(self, path: str, key: str) -> Session: ...


class Api(Protocol):
    """A module of `apis`."""

    def read(self, body: bytes, headers: Mapping[str, str]) -> ApiRequest: ...

    def error_body(self, error: GatewayError) -> Mapping[str, Any]: ...


@attrs.frozen(kw_only=True)
class Service:
    """What all routes share.

    Attributes:
        models: Names that clients may ask for, that of the model first.
        spell: The bytes of a token.
        keep_alive_s: Between two signs of life of an answer that is not there yet.
        unenforced: What becomes of a request that would force the model.
        begin_s: How long an agent may keep the runtime's loop from its own request.
    """

    sessions: SessionFinder
    loop: RuntimeLoop
    limits: ExchangeLimits
    models: tuple[str, ...]
    spell: Callable[[int], bytes]
    keep_alive_s: float
    unenforced: Literal["accept", "refuse"] = "accept"
    begin_s: float = math.inf


def routes(service: Service) -> list[tuple[str, Application]]:
    """The applications of every path, with their parameters in braces."""
    root = f"{PREFIX}/{{path}}"
    return [
        (f"{root}/v1/chat/completions", _Route(service, chat, _generate)),
        (f"{root}/v1/responses", _Route(service, responses, _generate)),
        (f"{root}/v1/messages", _Route(service, messages, _generate)),
        (f"{root}/v1/messages/count_tokens", _Route(service, messages, _count)),
        (f"{root}/v1/messages/{{rest:path}}", _Route(service, messages, _refuse_path)),
        (f"{root}/v1/models", _Route(service, _Models, _models)),
        (f"{root}/v1/models/{{model:path}}", _Route(service, _Models, _model)),
        (root, _Route(service, _Models, _is_there)),
        (f"{root}/", _Route(service, _Models, _is_there)),
        ("/", _Route(service, _Models, _is_there)),
    ]


def not_found(service: Service) -> Application:
    """Answers paths that are none."""
    return _Route(service, _Models, _refuse_path)


class _Models:
    """Routes without a body tell errors as OpenAI does."""

    error_body = staticmethod(openai_error)


class _Route:
    """One path's application; what is raised becomes a reply."""

    def __init__(
        self, service: Service, api: Any, handle: Callable[[_Visit], Awaitable[None]]
    ) -> None:
        self._service = service
        self._api = api
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._service.limits)
        visit = _Visit(self._service, self._api, exchange)
        await exchange.answer(lambda: self._handle(visit), visit.refuse)


class _Visit:
    """One request of a client.

    Attributes:
        request: The body, once it is read.
    """

    def __init__(self, service: Service, api: Api, exchange: Exchange) -> None:
        self.service = service
        self.api = api
        self.exchange = exchange
        self.request: ApiRequest | None = None

    def session(self) -> Session:
        """That of the path.

        Raises:
            GatewayError: The path or the key is none.
        """
        path = self.exchange.parameters["path"]
        return self.service.sessions.authenticate(path, self.exchange.key())

    async def read(self) -> ApiRequest:
        """The body.

        Raises:
            GatewayError: It cannot be served.
            ClientLeftError: It never came whole.
        """
        body = await self.exchange.body()
        request = self.request = self.api.read(body, self.exchange.headers)
        if request.model is not None:
            self.check_model(request.model)
        return request

    def check_model(self, name: str) -> None:
        """Refuse names of other models.

        Raises:
            GatewayError: It is one.
        """
        if name not in self.service.models:
            known = ", ".join(map(repr, self.service.models))
            message = f"model: {name!r} is not served here; expected {known}"
            raise GatewayError(404, "model_not_found", message, "model")

    def teller(self) -> Teller:
        """Tells answers to the request."""
        named = self.request.model if self.request is not None else None
        return Teller(named or self.service.models[0], int(wall()), self.service.spell)

    async def refuse(self, error: GatewayError) -> None:
        """Tell an error: as a reply, or where that has begun already, at its end."""
        request, exchange = self.request, self.exchange
        if request is not None and request.is_streamed and exchange.has_begun:
            await exchange.end(b"".join(request.failure_events(error, self.teller())))
        elif request is not None and _is_told_in_events(request, error):
            await exchange.reply(b"".join(request.failure_events(error, self.teller())), EVENTS)
        elif exchange.has_begun:
            await exchange.end(encode(self.api.error_body(error)))
        else:
            await exchange.reply_json(self.api.error_body(error), error.status)


def _is_told_in_events(request: ApiRequest, error: GatewayError) -> bool:
    return error.code == "context_length" and getattr(request, "tells_length_in_events", False)


class _Asked:
    """A call on the runtime's loop; its client may leave at any moment, and is gone then."""

    def __init__(self, session: Session, service: Service) -> None:
        self._session = session
        self._loop, self._begin_s = service.loop, service.begin_s
        self._completion: Completion | None = None
        self._has_left = False

    async def answer(self, call: GatewayCall) -> Completion:
        """The session's, from the loop that serves."""
        session = self._session
        try:
            return await self._loop.run(
                self._complete, call, begin_s=self._begin_s, activity=session.activity
            )
        except LoopBlockedError as error:
            session.fail(AgentError(str(error)))
            raise

    async def _complete(self, call: GatewayCall) -> Completion:
        completion = await self._session.complete(call)
        self._completion = completion
        if self._has_left:  # while the answer was on its way
            self._session.left(completion.id)
        return completion

    def leave(self) -> None:
        """The client has not got all of the answer, if there is one."""
        self._has_left = True
        if self._completion is not None:
            self._session.left(self._completion.id)


async def _generate(visit: _Visit) -> None:
    visit.exchange.require("POST")
    session = visit.session()
    request = await visit.read()
    check_forced(request.call, visit.service.unenforced)
    loop, asked = visit.service.loop, _Asked(session, visit.service)
    try:
        completion = await _completed(visit, asked, request)
        await _deliver(visit, request, completion)
    except BaseException:
        loop.post(asked.leave)
        raise
    loop.post(session.delivered, completion.id)
    visit.exchange.if_unread(lambda: loop.post(session.left, completion.id))


async def _completed(visit: _Visit, asked: _Asked, request: ApiRequest) -> Completion:
    """What the session answers; a client that leaves meanwhile cancels it."""
    async with open_task_group() as tasks:
        tasks.start_soon(_keep_alive, visit, request)
        return await visit.exchange.while_there(asked.answer, request.call)


async def _keep_alive(visit: _Visit, request: ApiRequest) -> None:
    """Signs of life of an answer that is not there yet: white space before the JSON of a body."""
    exchange = visit.exchange
    sign, headers = (request.keep_alive, EVENTS) if request.is_streamed else (b" ", JSON)
    while True:
        await anyio.sleep(visit.service.keep_alive_s)
        with anyio.CancelScope(shield=True):  # an event is written whole
            if not exchange.has_begun:
                await exchange.begin(200, headers)
            await exchange.write(sign)


async def _deliver(visit: _Visit, request: ApiRequest, completion: Completion) -> None:
    """Send the answer."""
    exchange = visit.exchange
    if request.is_streamed:
        data = b"".join(request.events(completion, visit.teller()))
    else:
        data = encode(request.body(completion, visit.teller()))
    if exchange.has_begun:
        await exchange.end(data)
    else:
        await exchange.reply(data, EVENTS if request.is_streamed else JSON)


async def _count(visit: _Visit) -> None:
    visit.exchange.require("POST")
    session = visit.session()
    request = await visit.read()
    tokens = await visit.service.loop.run(session.count_tokens, request.call)
    await visit.exchange.reply_json(messages.count_body(tokens))


async def _models(visit: _Visit) -> None:
    visit.exchange.require("GET", "HEAD")
    visit.session()
    served = [_model_body(name) for name in visit.service.models]
    ends = {"first_id": served[0]["id"], "last_id": served[-1]["id"], "has_more": False}
    await visit.exchange.reply_json({"object": "list", "data": served, **ends})


async def _model(visit: _Visit) -> None:
    visit.exchange.require("GET", "HEAD")
    visit.session()
    name = visit.exchange.parameters["model"]
    visit.check_model(name)
    await visit.exchange.reply_json(_model_body(name))


def _model_body(name: str) -> dict[str, Any]:
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


async def _is_there(visit: _Visit) -> None:
    visit.exchange.require("GET", "HEAD")
    await visit.exchange.reply(b"", [])


async def _refuse_path(visit: _Visit) -> None:
    raise GatewayError(404, "not_found", "no such path is served here")
