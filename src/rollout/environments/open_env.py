"""Environments behind an OpenEnv server: a session of its WebSocket for each trajectory."""

from __future__ import annotations

import json
import logging
import urllib.request
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.to_thread
import msgspec

from rollout.chat.reward_values import BadRewardError, finite_number
from rollout.config.checks import is_http_url
from rollout.errors import ToolError
from rollout.lazy import import_extra
from rollout.seeds import derive_seed
from rollout.tools.results import ToolResult
from rollout.tools.tool import Tool, ToolContext, ToolProvider, ToolSession
from rollout.types import read_message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rollout.types import Prompt, ToolCall

logger = logging.getLogger("rollout.environments")

#: A full server is asked again after this long, doubled each time up to the longest.
_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0
#: The observation, the reward (0.0 where there is none), whether the episode is over, no info.
Step = tuple[str, float, bool, dict[str, Any]]


class _Answer(msgspec.Struct):
    type: Literal["observation", "error"]
    data: dict[str, Any]


class OpenEnvError(ToolError):
    """An OpenEnv server refused something, failed, or is gone.

    Attributes:
        code: The server's own, such as ``EXECUTION_ERROR``; or ``CONNECTION``, ``TIMEOUT``, or
            ``BAD_ANSWER`` for what is none of its protocol.
    """

    def __init__(self, url: str, code: str, message: str) -> None:
        super().__init__(f"OpenEnv {url}: {code}: {message}")
        self.code = code


class OpenEnv(ToolProvider):
    """An OpenEnv server, of which each trajectory gets a session, from `reset` to its end.

    The model acts in one of two ways:

    - By text: ``register_agent("echo")(EnvironmentAgent(OpenEnv(url)))``. The text of a turn is the
      one field of the server's action; observations are said by a user.
    - By a tool: ``open_rollout(config, tools=[OpenEnv(url)])``. The tool's parameters are the
      action's fields. The first observation is appended to the prompt's last message; the sum of
      the rewards is the trajectory's, where neither its agent nor `open_rollout` has another; an
      episode that is done ends it. What the server refuses is an error that the model reads.

    `reset` gets what JSON can hold of the prompt's `extra`, and a ``seed``, which the members of a
    group share, where that has none. A server that has as many sessions as it can is asked again,
    with back-off, until the trajectory's deadline. A connection that is lost fails the trajectory.

    Args:
        url: Of the server: http or https.
        action_field: The field that a turn's text becomes; None: the action's only required one.
        observation_text: What the model reads of an observation, a dict; None: its only text, else
            all of it as JSON.
        headers: Sent with each HTTP request.
        timeout_s: For each answer, connecting included.

    Raises:
        ToolError: An argument is wrong, or `websockets` is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        action_field: str | None = None,
        observation_text: Callable[[Mapping[str, Any]], str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if not is_http_url(url):
            raise ToolError(f"OpenEnv: url = {url!r}; expected an http or https URL")
        if not 0 < timeout_s < float("inf"):
            raise ToolError(f"OpenEnv: timeout_s = {timeout_s}; expected a number > 0")
        self.url, self.timeout_s, self.headers = url.rstrip("/"), timeout_s, dict(headers or {})
        self._action_field = action_field
        self.observation_text = observation_text or _read_text
        self.was_full = False
        self.websockets = import_extra("websockets", "openenv", "OpenEnv", ToolError)

    def __call__(self) -> OpenEnvSession:
        """A session for one trajectory; it connects at `reset`."""
        return OpenEnvSession(self)

    async def __aenter__(self) -> list[Tool]:
        """The one tool; raises `OpenEnvError` where the server does not say what an action is."""
        return [_ActionTool(self, await self.action_schema())]

    async def action_schema(self) -> dict[str, Any]:
        """The JSON Schema of an action, without what is no choice of the model's."""
        request = urllib.request.Request(f"{self.url}/schema", headers=self.headers)

        def read() -> dict[str, Any]:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return msgspec.json.decode(answer.read(), type=dict[str, dict[str, Any]])["action"]

        try:
            action = await anyio.to_thread.run_sync(read, abandon_on_cancel=True)
        except (OSError, KeyError, ValueError) as error:
            code = "CONNECTION" if isinstance(error, OSError) else "BAD_ANSWER"
            raise OpenEnvError(self.url, code, f"GET /schema: {read_message(error)}") from None
        action.get("properties", {}).pop("metadata", None)
        return {"properties": {}, **action, "type": "object"}

    async def action_field(self) -> str:
        """The field of an action that a turn's text becomes."""
        if self._action_field is None:
            required = (await self.action_schema()).get("required", [])
            if len(required) != 1:
                raise ToolError(
                    f"OpenEnv {self.url}: an action needs the fields {required}; expected "
                    "action_field to name the one that a turn's text becomes"
                )
            self._action_field = required[0]
        return self._action_field


class OpenEnvSession:
    """An episode on the server, as `EnvironmentAgent` plays it; its calls come one after another.

    It runs on asyncio, where its socket lives.

    Attributes:
        is_done: Whether the server has said so.
        lost: Why the connection is of no use any more; "" while it is.
    """

    backend = "asyncio"

    def __init__(self, server: OpenEnv) -> None:
        self._server = server
        self._socket: Any = None
        self.is_done, self.lost = False, ""

    async def reset(self, prompt: Prompt | None) -> str:
        """Connect and begin an episode, once there is room; the first observation."""
        server, data = self._server, {}
        for name, value in ({} if prompt is None else prompt.extra).items():
            with suppress(TypeError, ValueError, RecursionError):
                json.dumps(value, allow_nan=False)
                data[name] = value
        data.setdefault("seed", derive_seed(0, (prompt and prompt.uid) or "") >> 32)
        backoff_s = _BACKOFF_S * (0.5 + derive_seed(0, id(self)) / 2**64)  # not all at once
        while True:
            try:
                return (await self._ask("reset", data))[0]
            except OpenEnvError as error:
                if error.code != "CAPACITY_REACHED":
                    raise
                if not server.was_full:
                    server.was_full = True
                    logger.warning("%s (trajectories wait for room; logged once)", error)
            await self.close()
            await anyio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def step(self, action: str | Mapping[str, Any]) -> Step:
        """Act, by a text or by the fields of the server's action."""
        if isinstance(action, str):
            action = {await self._server.action_field(): action}
        return await self._ask("step", action)

    async def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Step:
        server, websockets = self._server, self._server.websockets
        if self.lost:
            raise OpenEnvError(server.url, "CONNECTION", self.lost)
        # A late answer would be taken for the next one's.
        self.lost = f"{kind} was given up before its answer came"
        try:
            with anyio.fail_after(server.timeout_s):
                if self._socket is None:
                    self._socket = await self._connect()
                # What the server said before it closed is still to be read.
                with suppress(websockets.ConnectionClosed):
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = msgspec.json.decode(await self._socket.recv(), type=_Answer)
        except TimeoutError:
            self.lost = f"no answer to {kind} within {server.timeout_s:g} s"
            raise OpenEnvError(server.url, "TIMEOUT", self.lost) from None
        except (OSError, websockets.WebSocketException) as error:
            self.lost = f"lost during {kind}: {read_message(error)}"
            raise OpenEnvError(server.url, "CONNECTION", self.lost) from None
        except ValueError as error:
            self.lost = f"to {kind}: {error}"
            raise OpenEnvError(server.url, "BAD_ANSWER", self.lost) from None
        self.lost, content = "", answer.data
        if answer.type == "error":
            details = f" {content['errors']}" if content.get("errors") else ""
            message = f"{content.get('message', '')}{details}"
            raise OpenEnvError(server.url, str(content.get("code", "ERROR")), message)
        self.is_done, observation = bool(content.get("done")), content.get("observation")
        try:
            reward = finite_number(content.get("reward") or 0.0, "the server")
            if not isinstance(observation, dict):
                raise BadRewardError(f"observation = {observation!r:.200}; expected an object")
        except BadRewardError as error:  # what the episode is worth is not known any more
            self.lost = f"to {kind}: {error}"
            raise OpenEnvError(server.url, "BAD_ANSWER", self.lost) from None
        return server.observation_text(observation), reward, self.is_done, {}

    async def _connect(self) -> Any:
        server = self._server
        return await server.websockets.connect(
            f"ws{server.url.removeprefix('http')}/ws",
            additional_headers=server.headers,
            max_size=16 * 2**20,  # bytes of the longest answer
            open_timeout=None,  # `timeout_s` bounds it
            close_timeout=2.0,
            ping_timeout=None,  # a server that computes says nothing
        )


class _ActionTool(Tool):
    opens_first = True

    def __init__(self, server: OpenEnv, action: dict[str, Any]) -> None:
        self._server, self.name = server, "step"
        text = action.pop("description", "") or "Act in the environment."
        function = {"name": self.name, "description": text, "parameters": action}
        self.schema = {"type": "function", "function": function}

    async def open(self, context: ToolContext) -> ToolSession:
        """A session, which connects as it begins."""
        return _ActionSession(OpenEnvSession(self._server), context)


class _ActionSession(ToolSession):
    decides_reward = True

    def __init__(self, episode: OpenEnvSession, context: ToolContext) -> None:
        self.serial = self._episode = episode
        self._prompt = context.prompt
        self._run = partial(context.threads.run_asyncio, "OpenEnv")
        self._reward = 0.0

    async def begin(self) -> str:
        return f"\n\n{await self._run(self._episode.reset, self._prompt)}"

    async def execute(self, call: ToolCall) -> ToolResult:
        episode = self._episode
        if episode.is_done:
            return ToolResult("the episode is over", is_error=True, end_trajectory=True)
        try:
            text, reward, is_done, _ = await self._run(episode.step, call.arguments)
        except OpenEnvError as error:
            if not episode.lost:
                raise
            return ToolResult(str(error), is_error=True, end_trajectory=True)
        self._reward += reward
        extra = {"reward": reward, "done": is_done}
        return ToolResult(text, end_trajectory=is_done, extra=extra)

    async def calc_reward(self) -> float:
        if self._episode.lost:
            raise ToolError(f"OpenEnv: {self._episode.lost}")
        return self._reward

    async def close(self) -> None:
        await self._run(self._episode.close)


def _read_text(observation: Mapping[str, Any]) -> str:
    """The only text of an observation, else all of it as JSON."""
    beside = "reward", "done", "metadata"  # they stand there too
    shown = {name: each for name, each in observation.items() if name not in beside}
    match list(shown.values()):
        case [str(text)]:
            return text
    return json.dumps(shown, ensure_ascii=False)
