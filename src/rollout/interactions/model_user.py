"""A simulated user whom another model plays, behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import anyio

from rollout.chat.messages import template_messages, text_in, text_of_content
from rollout.errors import ConfigError, RolloutError
from rollout.interactions.interaction import Interaction, InteractionContext, InteractionTurn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import httpx

    from rollout.types import Message

#: What the model is told to say when its wishes have been met.
DONE = "###DONE###"
#: Answers of the server that another try may mend, as HTTP has them.
_TRANSIENT = frozenset({408, 409, 429, 500, 502, 503, 504})
#: Seconds before the second try; doubled at each further one.
_BACKOFF_S = 0.5
#: Bytes of an answer that are read: a thousand times what a user says.
MAX_BYTES = 4 * 2**20
#: Characters of a refusal that its error quotes.
_QUOTED = 200

INSTRUCTIONS = f"""\
You play a person who talks with an assistant. Stay in this role, whatever the assistant says; \
never answer in its place.

{{persona}}

Write one short message at a time, as such a person would. Do not give away at once all that you \
know. When your goal has been reached, or it is plain that it will not be, answer {DONE} and \
nothing else."""


class ModelUser:
    """Makes users whom a model plays.

    The model sees the conversation from the other side: what the user said are its own messages,
    what the assistant said are its user's. Tool calls and what tools answered are left out. It
    needs the extra ``http``. A try that fails for a reason that may pass (no connection, HTTP 429,
    5xx) is made again; then the trajectory fails, with the server's words.

    Args:
        base_url: Of the endpoint, up to and including ``/v1``.
        model: Its name there.
        persona: Who the user is and what the user wants; ``{…}`` fields are filled from the
            prompt's ``extra["interaction_kwargs"]``.
        name: What prompts and ``agent.interaction`` call it.
        api_key_variable: The environment variable with the key; None sends none.
        max_turns: Messages after which the user leaves.
        sampling: Further fields of the request: ``{"temperature": 0.7, "max_tokens": 200}``.
        timeout_s: Of one try.
        max_tries: Of each message.

    Raises:
        ConfigError: An argument cannot be used, or the extra is missing.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        persona: str,
        name: str = "model_user",
        api_key_variable: str | None = "OPENAI_API_KEY",
        max_turns: int = 8,
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        max_tries: int = 3,
    ) -> None:
        counts = {"max_turns": max_turns, "max_tries": max_tries}
        for field, value in counts.items():
            if value < 1:
                raise ConfigError(f"interaction {name!r}: {field} = {value}: expected at least 1")
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"interaction {name!r}: base_url = {base_url!r}: expected an http or https URL"
            )
        self.name = name
        self._persona = persona
        self._max_turns = max_turns
        self._endpoint = _Endpoint(
            label=f"interaction {name!r}",
            base_url=base_url,
            key="" if api_key_variable is None else os.environ.get(api_key_variable, ""),
            timeout_s=timeout_s,
            max_tries=max_tries,
            fields={"model": model, **(sampling or {})},
        )

    def __call__(self) -> Interaction:
        """A user who has said nothing beyond the prompt."""
        return _PlayedUser(self.name, self._persona, self._max_turns, self._endpoint)


class _Endpoint:
    """Where a user's model is asked."""

    def __init__(
        self,
        *,
        label: str,
        base_url: str,
        key: str,
        timeout_s: float,
        max_tries: int,
        fields: Mapping[str, Any],
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ConfigError(
                f'{label} needs httpx: pip install "rollout-rl[http]" ({error})'
            ) from error
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._httpx = httpx
        self._label = label
        self._max_tries = max_tries
        self._fields = fields
        self._options: dict[str, Any] = {
            "base_url": base_url.rstrip("/") + "/",
            "headers": headers,
            "timeout": timeout_s,
            "verify": httpx.create_ssl_context(),  # once: it reads all certificates
        }

    def new_client(self) -> httpx.AsyncClient:
        """A client with connections of its own; close it."""
        return self._httpx.AsyncClient(**self._options)

    async def complete(self, client: httpx.AsyncClient, messages: list[dict[str, str]]) -> str:
        """The model's next message.

        Raises:
            RolloutError: It did not answer, or not as such an endpoint does.
        """
        backoff_s = _BACKOFF_S
        for left in reversed(range(self._max_tries)):
            try:
                status, body = await self._post(client, {**self._fields, "messages": messages})
            except self._httpx.TransportError as error:
                fault = f"no answer ({type(error).__name__}: {error})"
            else:
                if status == 200:
                    return self._text_of(body)
                fault = f"HTTP {status}: {_start_of(body)}"
                if status not in _TRANSIENT:
                    break
            if left:
                await anyio.sleep(backoff_s)
                backoff_s *= 2
        raise RolloutError(f"{self._label}: {fault}")

    async def _post(
        self, client: httpx.AsyncClient, request: Mapping[str, Any]
    ) -> tuple[int, bytes]:
        """The status and the body of an answer, of which no more than `MAX_BYTES` are read."""
        body = bytearray()
        async with client.stream("POST", "chat/completions", json=request) as response:
            try:
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > MAX_BYTES:
                        await response.aclose()  # what reads on below ends by that
            except (self._httpx.StreamError, self._httpx.TransportError, anyio.ClosedResourceError):
                if len(body) <= MAX_BYTES:
                    raise
        if len(body) > MAX_BYTES:
            raise RolloutError(f"{self._label}: an answer of more than {MAX_BYTES} bytes")
        return response.status_code, bytes(body)

    def _text_of(self, body: bytes) -> str:
        try:
            content = json.loads(body)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise RolloutError(f"{self._label}: not a chat completion: {_start_of(body)}") from None
        return text_of_content(self._label, content or "")


def _start_of(body: bytes) -> str:
    return body[: 4 * _QUOTED].decode(errors="replace")[:_QUOTED]


class _PlayedUser(Interaction):
    def __init__(self, name: str, persona: str, max_turns: int, endpoint: _Endpoint) -> None:
        self.name = name
        self._persona = persona
        self._left = max_turns
        self._endpoint = endpoint
        self._instructions = ""
        self._client: httpx.AsyncClient | None = None

    async def start(self, context: InteractionContext) -> None:
        kwargs = {str(key): value for key, value in context.kwargs.items()}
        try:
            persona = self._persona.format(**kwargs)
        except (LookupError, ValueError) as error:
            raise RolloutError(
                f"interaction {self.name!r}: persona cannot be filled from the prompt's "
                f"interaction_kwargs ({type(error).__name__}: {error}); they have "
                f"{', '.join(sorted(kwargs)) or 'nothing'}"
            ) from None
        self._instructions = INSTRUCTIONS.format(persona=persona)
        self._client = self._endpoint.new_client()

    async def respond(self, messages: Sequence[Message | Mapping[str, Any]]) -> InteractionTurn:
        assert self._client is not None
        if not self._left:
            return InteractionTurn("", is_done=True)
        self._left -= 1
        seen = [{"role": "system", "content": self._instructions}, *_other_side(messages)]
        text = (await self._endpoint.complete(self._client, seen)).strip()
        if DONE in text or not text:
            return InteractionTurn("", is_done=True)
        return InteractionTurn(text)

    async def finish(self) -> None:
        if self._client is not None:
            await self._client.aclose()


def _other_side(messages: Sequence[Message | Mapping[str, Any]]) -> list[dict[str, str]]:
    """The conversation as the user's own model sees it."""
    roles = {"assistant": "user", "user": "assistant"}
    return [
        {"role": roles[message["role"]], "content": text_in(message["content"])}
        for message in template_messages(messages)
        if message["role"] in roles and text_in(message["content"])
    ]
