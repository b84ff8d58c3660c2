"""Values to bodies and events, and what every API writes of an answer in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from rollout.gateway.apis.reading import Body
from rollout.gateway.calls import GatewayCall
from rollout.gateway.length_errors import LENGTH_CODE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollout.gateway.calls import Answer, Completion, GatewayError
    from rollout.types import ToolCall

#: Writes JSON; keys stay in their order.
encode = msgspec.json.Encoder().encode

#: A comment, which clients skip: a sign of life while the model generates.
COMMENT = b": keep-alive\n\n"
#: JSON has no minus infinity.
LEAST_LOG_PROB = -9999.0


@attrs.frozen
class ReplyContext:
    """What bodies and events need beside the answers.

    Attributes:
        model: the name in the request.
        created: Seconds since 1970.
        spell: The bytes of a token.
    """

    model: str
    created: int
    spell: Callable[[int], bytes]

    def format_log_probs(self, answer: Answer) -> list[dict[str, Any]]:
        """One entry for each sampled id, as OpenAI's APIs have it."""
        top_ids = answer.top_ids or ((),) * len(answer.ids)
        top_log_probs = answer.top_log_probs or ((),) * len(answer.ids)
        return [
            {
                **self._format_token(token_id, log_prob),
                "top_logprobs": list(map(self._format_token, ids, log_probs)),
            }
            for token_id, log_prob, ids, log_probs in zip(
                answer.ids, answer.log_probs, top_ids, top_log_probs, strict=True
            )
        ]

    def _format_token(self, token_id: int, log_prob: float) -> dict[str, Any]:
        spelling = self.spell(token_id)
        text = spelling.decode(errors="replace")
        return {"token": text, "logprob": max(log_prob, LEAST_LOG_PROB), "bytes": list(spelling)}


@attrs.frozen(kw_only=True)
class ApiRequest:
    """A body that was read, and how its answer is written; each API has its own.

    Attributes:
        call: What it asks for.
        parsed: The body.
        keep_alive: An event without content.
        has_length_in_events: Whether a refusal for a length stands in the stream, where it is one.
    """

    call: GatewayCall
    parsed: Body
    keep_alive: bytes = COMMENT
    has_length_in_events: bool = False

    def format_body(self, completion: Completion, context: ReplyContext) -> Mapping[str, Any]:
        """The answer as one body."""
        raise NotImplementedError

    def format_events(self, completion: Completion, context: ReplyContext) -> Iterator[bytes]:
        """The answer as events: a text, a thought or a call is one delta."""
        raise NotImplementedError

    def format_failure(self, error: GatewayError, context: ReplyContext) -> Iterator[bytes]:
        """The error that ends a stream."""
        raise NotImplementedError


def format_event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, encode(data))


def write_arguments(call: ToolCall) -> str:
    """A call's arguments as JSON text."""
    return encode(call.arguments).decode()


def write_text_input(call: ToolCall) -> str:
    """What a tool of plain text gets of a call; the rest of the arguments does not fit there."""
    text = call.arguments.get("input")
    return text if isinstance(text, str) else write_arguments(call)


def format_ids(completion: Completion, answer: Answer, call: GatewayCall) -> dict[str, Any]:
    """Token ids, under the names that vLLM gives them; nothing where nobody wants them."""
    if not call.wants_ids:
        return {}
    return {
        "prompt_token_ids": completion.prompt_ids.tolist(),
        "token_ids": answer.ids.tolist(),
    }


def format_openai_error(error: GatewayError) -> Mapping[str, Any]:
    """An error as OpenAI's APIs have it."""
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
    "context_length": LENGTH_CODE,
    "authentication": "invalid_api_key",
    "invalid_request": "invalid_value",
    "too_large": "request_too_large",
}
