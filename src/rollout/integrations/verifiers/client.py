"""A client of verifiers whose model is a gateway's trajectory: exact tokens of every turn.

Written for verifiers 0.4.0.
"""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Literal

import attrs
import httpx
from verifiers.v1.clients import Client, EvalClient, TrainClientConfig
from verifiers.v1.clients.base import build_async_httpx
from verifiers.v1.configs.client import resolve_api_key
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.errors import ProviderError, model_error
from verifiers.v1.interception import server as interception
from verifiers.v1.types import Response, TurnTokens

from rollout.integrations.verifiers.door import TOKEN_VARIABLE
from rollout.limits import cleanup_scope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verifiers.v1.configs.client import BaseClientConfig
    from verifiers.v1.dialects import Dialect
    from verifiers.v1.graph import PendingTurn
    from verifiers.v1.types import SamplingConfig

#: How long the gateway may take to drop a trajectory.
FORGET_S = 5.0
#: Of a request, since answers are told whole.
_STREAMING = ("stream", "stream_options")


class RolloutClientConfig(TrainClientConfig):
    """A gateway that opens trajectories: `base_url` is its URL, without a path.

    verifiers takes it for a training client, which has it ask for whole answers.
    """

    type: Literal["train"] = "train"
    api_key_var: str = TOKEN_VARIABLE


class _Trajectory(EvalClient):
    """verifiers' own relay, to one trajectory, over connections that are shared."""

    def __init__(self, http: httpx.AsyncClient, address: Mapping[str, Any]) -> None:
        self.id: str = address["id"]
        self.model: str = address["model"]
        self.base_url = address["base_url"]
        self.api_key = address["api_key"]
        self.headers: dict[str, str] = {}
        self.client = http


class RolloutClient(Client):
    """A `Client` of verifiers: each session is one trajectory of a gateway.

    Its answers have `TurnTokens`: what the model read and sampled, with log-probs. A trajectory
    ends with `finish`, with `close`, or at its limits.

    Args:
        config: Where the gateway is.
        token: What the gateway wants to be shown; None: what `config.api_key_var` holds.
    """

    def __init__(self, config: BaseClientConfig, *, token: str | None = None) -> None:
        self._url = config.base_url.rstrip("/")
        self._http = build_async_httpx(config)
        shown = resolve_api_key(config) if token is None else token
        self._headers = {"authorization": f"Bearer {shown}"}
        self._sessions: dict[str, _Trajectory] = {}

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One turn of the session's trajectory; a call without a session is one of its own.

        Raises:
            NotImplementedError: The request is none of chat completions, which alone tell
                log-probs in verifiers' terms; or it shows images.
            ProviderError: The gateway refuses it, or does not answer.
        """
        if not isinstance(dialect, ChatDialect):
            raise NotImplementedError(
                f"{type(dialect).__name__}: the rollout client speaks chat completions only"
            )
        if _shows_images(body.get("messages") or ()):
            raise NotImplementedError(
                "images: the tokens that verifiers takes of a client have no pixel values; run the "
                "environment's agent on the gateway, and train on the rows of its trajectories"
            )
        name = session_id or f"call-{secrets.token_hex(8)}"
        trajectory = self._sessions.get(name) or await self._open(name, body)
        asked = {key: value for key, value in body.items() if key not in _STREAMING}
        asked |= {"model": trajectory.model, "return_token_ids": True, "logprobs": True}
        try:
            response = await trajectory.get_response(dialect, asked, sampling, None, turn, headers)
            response.tokens = tokens_of(response.raw or {})
        except BaseException:
            if session_id is None:  # nobody else can end it
                await self._forget(self._sessions.pop(name, trajectory))
            raise
        if session_id is None:
            await self.finish(name)
        return response

    async def finish(self, session_id: str, reward: float | None = None) -> dict[str, Any]:
        """End a session's trajectory: how it ended, with its ``rows``.

        Raises:
            KeyError: There is no such session.
            ProviderError: The gateway does not answer.
        """
        trajectory = self._sessions.pop(session_id)
        path = f"/trajectories/{trajectory.id}"
        try:
            await self._call("POST", f"{path}/finish", {"reward": reward})
            return await self._call("GET", f"{path}/rows")
        finally:
            await self._forget(trajectory)

    async def close(self) -> None:
        """End every trajectory, whatever becomes of the others, and the connections."""
        async with AsyncExitStack() as ends:
            ends.push_async_callback(self._http.aclose)
            for name in self._sessions:
                ends.push_async_callback(self.finish, name)

    async def _open(self, name: str, body: Mapping[str, Any]) -> _Trajectory:
        """A trajectory for a session; calls that come at once share it."""
        prompt = {"messages": body["messages"], "uid": name}
        address = await self._call("POST", "/trajectories", {"prompt": prompt})
        opened = _Trajectory(self._http, address)
        kept = self._sessions.setdefault(name, opened)
        if kept is not opened:
            await self._forget(opened)
        return kept

    async def _forget(self, trajectory: _Trajectory) -> None:
        """Have the gateway drop a trajectory, cancelled or not, so that it keeps no place."""
        with cleanup_scope(FORGET_S), suppress(ProviderError):
            await self._call("DELETE", f"/trajectories/{trajectory.id}")

    async def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            answer = await self._http.request(
                method, f"{self._url}{path}", json=body, headers=self._headers
            )
        except httpx.HTTPError as error:
            raise model_error(str(error), status_code=503) from error
        if answer.is_error:
            raise model_error(f"gateway: {answer.text}", status_code=answer.status_code)
        told: dict[str, Any] = answer.json()
        return told


def _shows_images(messages: Any) -> bool:
    contents = [m.get("content") for m in messages if isinstance(m, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def tokens_of(answer: Mapping[str, Any]) -> TurnTokens:
    """The tokens of a gateway's answer: those of its prompt, and those sampled."""
    choice = answer["choices"][0]
    return TurnTokens(
        prompt_ids=answer["prompt_token_ids"],
        completion_ids=choice["token_ids"],
        completion_logprobs=[each["logprob"] for each in choice["logprobs"]["content"]],
    )


@attrs.frozen
class _Resolving:
    """verifiers' `resolve_client`, which knows our configuration too."""

    _before: Any

    def __call__(self, config: BaseClientConfig) -> Client:
        if isinstance(config, RolloutClientConfig):
            return RolloutClient(config)
        client: Client = self._before(config)
        return client


def install() -> None:
    """Have the environments of this process take a `RolloutClientConfig` for their model.

    verifiers 0.4 has no hook for clients: what its interception server resolves them with is
    replaced. Again it changes nothing.
    """
    if not isinstance(interception.resolve_client, _Resolving):
        interception.resolve_client = _Resolving(interception.resolve_client)
