"""Values to bodies and events, and what of an answer every API tells in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rollout.types import InvalidToolCall, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rollout.gateway.calls import Answer, Completion, GatewayCall, GatewayError

#: Writes JSON; keys stay in their order.
encode = msgspec.json.Encoder().encode

#: A comment, which clients skip: a sign of life while the model generates.
COMMENT = b": keep-alive\n\n"
#: JSON has no minus infinity.
LEAST_LOG_PROB = -9999.0


class Teller:
    """What answers need beside themselves to be told.

    Attributes:
        model: The name that the client asked for.
        created: Seconds since 1970.
    """

    def __init__(self, model: str, created: int, spell: Callable[[int], bytes]) -> None:
        self.model = model
        self.created = created
        self._spell = spell

    def log_probs(self, answer: Answer) -> list[dict[str, Any]]:
        """One entry for each sampled id, as OpenAI's APIs have it."""
        top_ids = answer.top_ids or ((),) * len(answer.ids)
        top_log_probs = answer.top_log_probs or ((),) * len(answer.ids)
        return [
            {
                **self._token(token_id, log_prob),
                "top_logprobs": list(map(self._token, ids, log_probs)),
            }
            for token_id, log_prob, ids, log_probs in zip(
                answer.ids, answer.log_probs, top_ids, top_log_probs, strict=True
            )
        ]

    def _token(self, token_id: int, log_prob: float) -> dict[str, Any]:
        spelling = self._spell(token_id)
        text = spelling.decode(errors="replace")
        return {"token": text, "logprob": max(log_prob, LEAST_LOG_PROB), "bytes": list(spelling)}


class ApiRequest(Protocol):
    """A body that was read, and how its answer is written.

    Attributes:
        call: What it asks for.
        model: The name it asks for; None where it names none.
        is_streamed: Whether it wants events.
        keep_alive: An event of no content.
    """

    call: GatewayCall
    model: str | None
    is_streamed: bool
    keep_alive: bytes

    def body(self, completion: Completion, teller: Teller) -> Mapping[str, Any]:
        """The answer as one body."""
        ...

    def events(self, completion: Completion, teller: Teller) -> Iterator[bytes]:
        """The answer as events: a text, a thought or a call is one delta."""
        ...

    def failure_events(self, error: GatewayError, teller: Teller) -> Iterator[bytes]:
        """The error that ends a stream."""
        ...


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, encode(data))


def valid_calls(answer: Answer) -> list[ToolCall]:
    """The calls that clients can run; the others stand in the text."""
    return [call for call in answer.calls if not isinstance(call, InvalidToolCall)]


def arguments_text(call: ToolCall) -> str:
    """A call's arguments as JSON text."""
    return encode(call.arguments).decode()


def text_input(call: ToolCall) -> str:
    """What a tool of plain text is told of a call; the rest of the arguments has no place there."""
    text = call.arguments.get("input")
    return text if isinstance(text, str) else arguments_text(call)


def ids_of(completion: Completion, answer: Answer) -> dict[str, Any]:
    """Token ids, under the names that vLLM gives them."""
    return {
        "prompt_token_ids": completion.prompt_ids.tolist(),
        "token_ids": answer.ids.tolist(),
    }


def openai_error(error: GatewayError) -> Mapping[str, Any]:
    """As OpenAI's APIs tell an error."""
    kind = _OPENAI_TYPES.get(error.status, "invalid_request_error")
    code = _OPENAI_CODES.get(error.code, error.code)
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": code}}


_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    500: "server_error",
    503: "server_error",
}
_OPENAI_CODES = {
    "context_length": "context_length_exceeded",
    "authentication": "invalid_api_key",
    "invalid_request": "invalid_value",
    "too_large": "request_too_large",
}
