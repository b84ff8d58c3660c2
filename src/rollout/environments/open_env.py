"""Environments behind an OpenEnv server: a session of its WebSocket for each trajectory."""

from __future__ import annotations

import itertools
import json
import logging
import math
import urllib.request
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from rollout.errors import ToolError
from rollout.seeds import derive_seed
from rollout.tools.providers import ToolProvider
from rollout.tools.results import ToolResult
from rollout.tools.tool import Tool, ToolContext, ToolSession
from rollout.types import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    from rollout.types import Prompt, ToolCall

logger = logging.getLogger("rollout.environments")

#: A full server is asked again after this long, doubled each time up to the longest.
_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0
_CLOSE_S = 2.0
_NO_OBSERVATION = frozenset(("reward", "done", "metadata"))


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
      one text field of the server's action; observations are said by a user.
    - By a tool: ``open_rollout(config, tools=[OpenEnv(url)])``. The tool's parameters are the
      action's fields. The first observation is appended to the prompt's last message; the sum of
      the rewards is the trajectory's, where neither its agent nor `open_rollout` has another; an
      episode that is done ends it. What the server refuses is an error that the model reads.

    `reset` gets what JSON can hold of the prompt's `extra`, and a ``seed``, which the members of a
    group share, where that has none. A server that has as many sessions as it can is asked again,
    with back-off, until the trajectory's deadline. A connection that is lost fails the trajectory.

    Args:
        url: Of the server: http, https, ws or wss.
        action_field: The field that a turn's text becomes; None: the action's only required text.
        observation_text: What the model reads of an observation, a dict; None: its only text, else
            all of it as JSON.
        columns: Keys of `extra` that `reset` gets; None: all.
        tool_name: What the model calls the tool.
        headers: Sent with each HTTP request.
        timeout_s: For connecting, and for each answer.
        max_message_bytes: The longest answer that is read.

    Raises:
        ToolError: An argument is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        action_field: str | None = None,
        observation_text: Callable[[Mapping[str, Any]], str] | None = None,
        columns: Sequence[str] | None = None,
        tool_name: str = "step",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        max_message_bytes: int = 16 * 2**20,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ToolError(f"OpenEnv: url = {url!r}; expected an http, https, ws or wss URL")
        if isinstance(columns, str):
            raise ToolError(f"OpenEnv: columns = {columns!r}; expected a list of names")
        if not 0 < timeout_s < math.inf:
            raise ToolError(f"OpenEnv: timeout_s = {timeout_s}; expected a number > 0")
        tls = "s" if parts.scheme in ("https", "wss") else ""
        path = parts.path.removesuffix("/ws").rstrip("/")
        self.url = url
        self.socket_url = parts._replace(scheme=f"ws{tls}", path=f"{path}/ws").geturl()
        self._schema_url = parts._replace(scheme=f"http{tls}", path=f"{path}/schema").geturl()
        self._action_field = action_field
        self.observation_text = observation_text or _read_text
        self._columns, self.tool_name = columns, tool_name
        self.headers = dict(headers or {})
        self.timeout_s, self.max_message_bytes = timeout_s, max_message_bytes
        self.was_full = False

    def __call__(self) -> OpenEnvSession:
        """A session for one trajectory; it connects at `reset`."""
        return OpenEnvSession(self, reads_text=True)

    async def __aenter__(self) -> list[Tool]:
        """The one tool.

        Raises:
            ToolError: `websockets` is missing, or the server does not say what an action is.
        """
        _import_websockets()
        return [_ActionTool(self, await self.action_schema())]

    async def action_schema(self) -> dict[str, Any]:
        """The JSON Schema of an action, without what is no choice of the model's.

        Raises:
            OpenEnvError: The server does not answer, or otherwise.
        """
        request = urllib.request.Request(self._schema_url, headers=self.headers)

        def read() -> Any:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return json.load(answer)

        try:
            answer = await anyio.to_thread.run_sync(read, abandon_on_cancel=True)
        except (OSError, ValueError) as error:
            raise OpenEnvError(self.url, "CONNECTION", f"GET /schema: {text_of(error)}") from None
        action = answer.get("action") if isinstance(answer, dict) else None
        if not isinstance(action, dict):
            raise OpenEnvError(self.url, "BAD_ANSWER", f"GET /schema: {answer!r:.200}")
        properties = {**action.get("properties", {})}
        properties.pop("metadata", None)
        return {**action, "type": "object", "properties": properties}

    async def action_field(self) -> str:
        """The field of an action that a turn's text becomes.

        Raises:
            ToolError: It has not one text field that must be given.
        """
        if self._action_field is None:
            schema = await self.action_schema()
            fields = schema["properties"]
            required = [name for name in schema.get("required", ()) if name in fields]
            texts = [name for name in required if fields[name].get("type") == "string"]
            if len(texts) != 1 or len(required) != 1:
                raise ToolError(
                    f"OpenEnv {self.url}: an action has the fields "
                    f"{', '.join(map(repr, fields)) or 'none'}; expected action_field to name the "
                    "one that a turn's text becomes"
                )
            self._action_field = texts[0]
        return self._action_field

    def reset_data(self, prompt: Prompt | None) -> dict[str, Any]:
        """What `reset` is sent."""
        if prompt is None:
            return {}
        extra = prompt.extra
        names = extra if self._columns is None else [n for n in self._columns if n in extra]
        data = {name: extra[name] for name in names if _is_json(extra[name])}
        data.setdefault("seed", derive_seed(0, prompt.uid or "") >> 32)
        return data


class OpenEnvSession:
    """An episode on the server, as `EnvironmentAgent` plays it; its calls come one after another.

    It runs on asyncio, where its socket lives.

    Attributes:
        is_done: Whether the server has said so.
        lost: Why the connection is of no use any more; "" while it is.
    """

    backend = "asyncio"

    def __init__(self, server: OpenEnv, *, reads_text: bool) -> None:
        self._server, self._reads_text = server, reads_text
        self._socket: Any = None
        self._field = ""
        self.is_done = False
        self.lost = ""

    async def reset(self, prompt: Prompt | None) -> str:
        """Connect and begin an episode, once there is room; the first observation.

        Raises:
            OpenEnvError: The server refuses it, or cannot be reached.
        """
        server = self._server
        if self._reads_text:
            self._field = await server.action_field()
        data = server.reset_data(prompt)
        for tries in itertools.count():
            try:
                await self._connect()
                answer = await self._ask("reset", data)
                break
            except OpenEnvError as error:
                if error.code != "CAPACITY_REACHED":
                    raise
                if not server.was_full:
                    server.was_full = True
                    logger.warning("%s (trajectories wait for room; said once)", error)
            await self.close()
            spread = 0.5 + derive_seed(tries, id(self)) / 2**64  # or all would come back at once
            await anyio.sleep(spread * min(_BACKOFF_S * 2**tries, _MAX_BACKOFF_S))
        return self._read_observation(answer)[0]

    async def step(
        self, action: str | Mapping[str, Any]
    ) -> tuple[str, float, bool, dict[str, Any]]:
        """Act: the observation, the reward (0.0 where there is none), whether it is done, nothing.

        Raises:
            OpenEnvError: The server refuses the action, or is gone.
        """
        data = {self._field: action} if isinstance(action, str) else dict(action)
        return self._read_observation(await self._ask("step", data))

    async def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        with suppress(OSError, _import_websockets().ConnectionClosed):
            with anyio.move_on_after(_CLOSE_S):
                await socket.send('{"type":"close"}')
        await socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        if self.lost:
            raise OpenEnvError(self._server.url, "CONNECTION", self.lost)
        # A late answer would be taken for the next one's.
        self.lost = f"{kind} was given up before its answer came"
        message = json.dumps({"type": kind, "data": data})
        try:
            answer = await self._exchange(message)
        except TimeoutError:
            self.lost = f"no answer to {kind} within {self._server.timeout_s:g} s"
            raise OpenEnvError(self._server.url, "TIMEOUT", self.lost) from None
        except (OSError, _import_websockets().WebSocketException) as error:
            self.lost = f"lost during {kind}: {text_of(error)}"
            raise OpenEnvError(self._server.url, "CONNECTION", self.lost) from None
        is_answer = isinstance(answer, dict) and isinstance(answer.get("data"), dict)
        if not is_answer or answer.get("type") not in ("observation", "error"):
            self.lost = f"to {kind}: {answer!r:.200}"
            raise OpenEnvError(self._server.url, "BAD_ANSWER", self.lost)
        self.lost = ""
        content: dict[str, Any] = answer["data"]
        if answer["type"] == "error":
            details = f" {content['errors']}" if content.get("errors") else ""
            message = f"{content.get('message', '')}{details}"
            raise OpenEnvError(self._server.url, str(content.get("code", "ERROR")), message)
        return content

    async def _exchange(self, message: str) -> Any:
        """Send a message and read the answer, a text where it is no JSON."""
        with anyio.fail_after(self._server.timeout_s):
            # What the server said before it closed is still to be read.
            with suppress(_import_websockets().ConnectionClosed):
                await self._socket.send(message)
            answer = await self._socket.recv()
        try:
            return json.loads(answer)
        except ValueError:
            return answer

    async def _connect(self) -> None:
        server, websockets = self._server, _import_websockets()
        try:
            self._socket = await websockets.connect(
                server.socket_url,
                additional_headers=server.headers,
                max_size=server.max_message_bytes,
                open_timeout=server.timeout_s,
                close_timeout=_CLOSE_S,
                ping_timeout=None,  # a server that computes says nothing; `timeout_s` bounds that
            )
        except (OSError, websockets.WebSocketException) as error:
            raise OpenEnvError(server.url, "CONNECTION", text_of(error)) from None

    def _read_observation(self, data: dict[str, Any]) -> tuple[str, float, bool, dict[str, Any]]:
        observation = data.get("observation")
        if not isinstance(observation, dict):
            raise OpenEnvError(self._server.url, "BAD_ANSWER", f"observation: {observation!r:.200}")
        self.is_done = bool(data.get("done"))
        reward = data.get("reward")
        text = self._server.observation_text(observation)
        return text, 0.0 if reward is None else reward, self.is_done, {}


class _ActionTool(Tool):
    opens_first = True

    def __init__(self, server: OpenEnv, action: dict[str, Any]) -> None:
        self._server, self.name = server, server.tool_name
        description = action.pop("description", "") or "Act in the environment."
        action.pop("title", None)
        self.schema = {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": action},
        }

    async def open(self, context: ToolContext) -> ToolSession:
        """A session, which connects as it begins."""
        return _ActionSession(OpenEnvSession(self._server, reads_text=False), context)


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
    shown = {name: each for name, each in observation.items() if name not in _NO_OBSERVATION}
    values = list(shown.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(shown, ensure_ascii=False)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _import_websockets() -> ModuleType:
    try:
        import websockets
    except ImportError as error:
        raise ToolError(
            f"OpenEnv needs the package websockets ({error}): pip install 'rollout-rl[openenv]'"
        ) from error
    return websockets
