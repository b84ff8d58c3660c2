"""The answers of Anthropic's messages: blocks, and the events that build them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.gateway.apis.writing import (
    AnswerStream,
    Teller,
    Telling,
    arguments_text,
    event,
    ids_of,
    valid_calls,
)
from rollout.gateway.calls import Answer, Completion, Draft, GatewayCall, GatewayError, told_text

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

    def stream(self, teller: Teller) -> AnswerStream:
        """Each block opened, told in differences, and closed."""
        return _MessagesStream(teller, tells_ids=self.call.wants_ids)


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


class _MessagesStream:
    """See `AnswerStream`."""

    def __init__(self, teller: Teller, *, tells_ids: bool) -> None:
        self._teller = teller
        self._tells_ids = tells_ids
        self._telling = Telling()
        self._has_begun = False
        self._count = 0  # blocks that have been opened
        self._open: str | None = None  # the type of the last one
        self._answer_id = ""

    def more(self, draft: Draft) -> bytes:
        (said,) = draft.answers
        if said is None:
            return b""
        usage = _tokens(draft.prompt_tokens, 0, 0)
        self._answer_id = said.id
        events = [*self._begin(draft.id, usage), *self._texts(said.text, said.reasoning)]
        return b"".join(events)

    def end(self, completion: Completion) -> bytes:
        return b"".join(self._rest(completion))

    def failure(self, error: GatewayError) -> bytes:
        return event(error_body(error), "error")

    def _begin(self, message_id: str, usage: Mapping[str, Any]) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            message = _message(message_id, self._teller, {**usage, "output_tokens": 0})
            yield _event("message_start", message=message)

    def _texts(self, text: str, reasoning: str | None) -> Iterator[bytes]:
        """What is new of thoughts and text, each in its block; thoughts that come late after it."""
        has_thought = self._telling.reasoning is not None
        thought = self._telling.more_reasoning(reasoning)
        is_late = self._open == "text"
        if thought is not None and not is_late:
            yield from self._think(thought)
        said = self._telling.more_text(text)
        if said:
            if self._open != "text":
                yield from self._close()
                yield self._start("text", text="")
            yield self._delta("text_delta", text=said)
        if thought and is_late:
            yield from self._close()
            yield from self._think(thought.removeprefix("\n") if has_thought else thought)

    def _think(self, thought: str) -> Iterator[bytes]:
        if self._open != "thinking":
            yield self._start("thinking", thinking="", signature="")
        if thought:
            yield self._delta("thinking_delta", thinking=thought)

    def _rest(self, completion: Completion) -> Iterator[bytes]:
        (answer,) = completion.answers
        usage, self._answer_id = _usage(completion), answer.id
        yield from self._begin(completion.id, usage)
        yield from self._texts(told_text(answer), answer.reasoning)
        yield from self._close()
        for call in valid_calls(answer):
            yield self._start("tool_use", id=call.id, name=call.name, input={})
            yield self._delta("input_json_delta", partial_json=arguments_text(call))
            yield from self._close()
        more = ids_of(completion, answer) if self._tells_ids else {}
        yield _event("message_delta", delta=_end(answer) | more, usage=usage)
        yield _event("message_stop")

    def _start(self, kind: str, **block: Any) -> bytes:
        self._open, at = kind, self._count
        self._count += 1
        return _event("content_block_start", index=at, content_block={"type": kind} | block)

    def _delta(self, kind: str, **delta: Any) -> bytes:
        told = {"type": kind} | delta
        return _event("content_block_delta", index=self._count - 1, delta=told)

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=self._answer_id)
        if self._open is not None:
            yield _event("content_block_stop", index=self._count - 1)
        self._open = None


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
