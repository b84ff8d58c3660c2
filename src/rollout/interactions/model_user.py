"""A simulated user whom another model plays, behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rollout.chat.messages import template_messages, text_in, text_of_content
from rollout.errors import ConfigError, RolloutError
from rollout.interactions.interaction import Interaction, InteractionContext, InteractionTurn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import openai

    from rollout.types import Message

#: What the model is told to say when its wishes have been met.
DONE = "###DONE###"
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
    needs the extra ``users``, OpenAI's client: a try that fails for a reason that may pass (no
    connection, HTTP 429, 5xx) is made again; then the trajectory fails, with the server's words.

    Args:
        base_url: Of the endpoint, up to and including ``/v1``.
        model: Its name there.
        persona: Who the user is and what the user wants; ``{…}`` fields are filled from the
            prompt's ``extra["interaction_kwargs"]``.
        name: What prompts and ``agent.interaction`` call it.
        api_key_variable: The environment variable with the key; None sends none.
        max_turns: Messages after which the user leaves.
        sampling: Further fields of the request, the server's own too: ``{"top_k": 40}``.
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
        if min(max_turns, max_tries) < 1 or timeout_s <= 0:
            text = f"{max_turns = }, {max_tries = }, {timeout_s = }: expected at least 1, 1 and > 0"
            raise ConfigError(f"interaction {name!r}: {text}")
        if not str(base_url).startswith(("http://", "https://")):
            raise ConfigError(
                f"interaction {name!r}: base_url = {base_url!r}: expected an http or https URL"
            )
        try:
            import httpx
            import openai
        except ImportError as error:
            raise ConfigError(
                f'interaction {name!r} needs openai: pip install "rollout-rl[users]" ({error})'
            ) from error
        self.name, self.persona, self.max_turns = name, persona, max_turns
        self.fields: dict[str, Any] = {"model": model, "extra_body": dict(sampling or {})}
        certificates = httpx.create_ssl_context()  # once: it reads all of them
        api_key = os.environ.get(api_key_variable or "", "none")  # the client wants one

        def make_client() -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(
                base_url=base_url,
                api_key=api_key,
                timeout=timeout_s,
                max_retries=max_tries - 1,
                http_client=openai.DefaultAsyncHttpxClient(verify=certificates),
            )

        self.make_client = make_client

    def __call__(self) -> Interaction:
        """A user who has said nothing beyond the prompt."""
        return _PlayedUser(self)


class _PlayedUser(Interaction):
    def __init__(self, model: ModelUser) -> None:
        self.name, self._model, self._left = model.name, model, model.max_turns
        self._instructions = ""
        self._client: openai.AsyncOpenAI | None = None

    async def start(self, context: InteractionContext) -> None:
        kwargs = {str(key): value for key, value in context.kwargs.items()}
        try:
            persona = self._model.persona.format(**kwargs)
        except (LookupError, ValueError) as error:
            known, kind = ", ".join(sorted(kwargs)) or "nothing", type(error).__name__
            raise RolloutError(
                f"interaction {self.name!r}: persona cannot be filled from the prompt's "
                f"interaction_kwargs ({kind}: {error}); they have {known}"
            ) from None
        self._instructions = INSTRUCTIONS.format(persona=persona)
        self._client = self._model.make_client()

    async def respond(self, messages: Sequence[Message | Mapping[str, Any]]) -> InteractionTurn:
        import openai

        if not self._left:
            return InteractionTurn("", is_done=True)
        self._left -= 1
        roles = {"assistant": "user", "user": "assistant"}  # the model sees the other side
        seen: list[Any] = [{"role": "system", "content": self._instructions}]
        seen += [
            {"role": roles[message["role"]], "content": text_in(message["content"])}
            for message in template_messages(messages)
            if message["role"] in roles and text_in(message["content"])
        ]
        assert self._client is not None
        label, completions = f"interaction {self.name!r}", self._client.chat.completions
        try:
            completion: Any = await completions.create(messages=seen, **self._model.fields)
        except openai.APIStatusError as error:
            why = f"HTTP {error.status_code}: {error.response.text[:_QUOTED]}"
            raise RolloutError(f"{label}: {why}") from None
        except (openai.APIError, ValueError) as error:  # also what is no JSON
            cause = error.__cause__ or error
            raise RolloutError(f"{label}: no answer ({type(cause).__name__}: {cause})") from None
        try:
            content = completion.choices[0].message.content
        except (AttributeError, LookupError, TypeError):
            text = f"{completion!r:.{_QUOTED}}"
            raise RolloutError(f"{label}: not a chat completion: {text}") from None
        text = text_of_content(label, content or "").strip()
        is_done = DONE in text or not text
        return InteractionTurn("" if is_done else text, is_done=is_done)

    async def finish(self) -> None:
        if self._client is not None:
            await self._client.close()
