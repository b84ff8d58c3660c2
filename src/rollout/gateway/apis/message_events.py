"""The answers of Anthropic's messages: blocks, and the events that build them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.gateway.apis.writing import (
    Teller,
    encode,
    event,
    ids_of,
    valid_calls,
)
from rollout.gateway.calls import Answer, Completion, GatewayCall, GatewayError, told_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FINISH = {
    "stop": "end_turn",
    "length": "max_tokens",
    "calls": "tool_use",
    "stop_string": "stop_sequence",
}
#: Agents compact their conversation when an error begins with this.
TOO_LONG = "prompt is too long: "


def error_body(error: GatewayError) -> Mapping[str, Any]:
    """An error, as this API tells it."""
    message = str(error)
    if error.code == "context_length" and not message.startswith(TOO_LONG):
        message = TOO_LONG + message
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "api_error",
}


class MessagesRequest:
    """A body that was read; see `ApiRequest`."""

    keep_alive = event({"type": "ping"}, "ping")

    def __init__(self, call: GatewayCall, *, model: str | None, is_streamed: bool) -> None:
        self.call = call
        self.model = model
        self.is_streamed = is_streamed

    def body(self, completion: Completion, teller: Teller) -> Mapping[str, Any]:
        """The whole answer."""
        (answer,) = completion.answers
        message = _message(completion.id, teller, _usage(completion))
        message |= {"content": list(_blocks(answer))} | _end(answer)
        return message | (ids_of(completion, answer) if self.call.wants_ids else {})

    def events(self, completion: Completion, teller: Teller) -> Iterator[bytes]:
        """Each block opened, said in one delta, and closed."""
        (answer,) = completion.answers
        usage = _usage(completion)
        message = _message(completion.id, teller, {**usage, "output_tokens": 0})
        yield _event("message_start", message=message)
        for index, block in enumerate(_blocks(answer)):
            opened, deltas = _open_block(block, answer)
            yield _event("content_block_start", index=index, content_block=opened)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ids = ids_of(completion, answer) if self.call.wants_ids else {}
        yield _event("message_delta", delta=_end(answer) | ids, usage=usage)
        yield _event("message_stop")

    def failure_events(self, error: GatewayError, teller: Teller) -> Iterator[bytes]:
        yield event(error_body(error), "error")


def count_body(tokens: int) -> Mapping[str, Any]:
    """What ``count_tokens`` answers."""
    return {"input_tokens": tokens}


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind} | data, kind)


def _message(message_id: str, teller: Teller, usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": teller.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _end(answer: Answer) -> dict[str, Any]:
    reason = FINISH[answer.finish]
    if reason == "tool_use" and not valid_calls(answer):
        reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": answer.stop_string}


def _blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    if answer.reasoning is not None:
        yield {"type": "thinking", "thinking": answer.reasoning, "signature": answer.id}
    text = told_text(answer)
    if text:
        yield {"type": "text", "text": text}
    for call in valid_calls(answer):
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}


def _open_block(
    block: dict[str, Any], answer: Answer
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it is opened, and the deltas that fill it."""
    if block["type"] == "thinking":
        thought = [{"type": "thinking_delta", "thinking": block["thinking"]}]
        signature = {"type": "signature_delta", "signature": answer.id}
        deltas = [*(thought if block["thinking"] else []), signature]
        return block | {"thinking": "", "signature": ""}, deltas
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    arguments = encode(block["input"]).decode()
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _usage(completion: Completion) -> dict[str, Any]:
    sampled = sum(len(answer.ids) for answer in completion.answers)
    return _tokens(len(completion.prompt_ids), completion.cached_tokens, sampled)


def _tokens(read: int, cached: int, sampled: int) -> dict[str, Any]:
    """As Anthropic counts: what was cached is not among `input_tokens`."""
    return {
        "input_tokens": read - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
    }
