"""The answers of OpenAI's chat completions: choices, and the events that build them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.gateway.apis.writing import (
    COMMENT,
    Teller,
    arguments_text,
    event,
    openai_error,
    valid_calls,
)
from rollout.gateway.calls import Answer, Completion, GatewayCall, GatewayError, told_text

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Mapping

#: Of a delta that says nothing of these.
_NONE: dict[str, Any] = {"logprobs": None, "finish_reason": None}
FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls", "stop_string": "stop"}


def error_body(error: GatewayError) -> Mapping[str, Any]:
    """An error, as this API tells it."""
    return openai_error(error)


class ChatRequest:
    """A body that was read; see `ApiRequest`."""

    keep_alive = COMMENT

    def __init__(
        self, call: GatewayCall, *, model: str | None, is_streamed: bool, tells_usage: bool
    ) -> None:
        self.call = call
        self.model = model
        self.is_streamed = is_streamed
        self._tells_usage = tells_usage

    def body(self, completion: Completion, teller: Teller) -> Mapping[str, Any]:
        """The whole answer."""
        choices = []
        for index, answer in enumerate(completion.answers):
            choice = {
                "index": index,
                "message": _message(answer),
                "logprobs": self.log_probs(answer, teller),
                "finish_reason": _finish(answer),
            }
            choices.append(choice | self.token_ids(answer))
        whole = _head(completion.id, teller, "chat.completion")
        more = {"choices": choices, "usage": _usage(completion)}
        return whole | more | self.prompt(completion.prompt_ids)

    def events(self, completion: Completion, teller: Teller) -> Iterator[bytes]:
        """Chunks of each choice: its role, thoughts, text, each call, and its end."""
        head = _head(completion.id, teller, "chat.completion.chunk")
        rest: dict[str, Any] = {"usage": None} if self._tells_usage else {}
        prompt = self.prompt(completion.prompt_ids)
        for index, answer in enumerate(completion.answers):
            for choice in self._deltas(answer, teller):
                yield event(head | {"choices": [{"index": index} | choice]} | rest | prompt)
                prompt = {}
        if self._tells_usage:
            yield event(head | {"choices": [], "usage": _usage(completion)})
        yield b"data: [DONE]\n\n"

    def failure_events(self, error: GatewayError, teller: Teller) -> Iterator[bytes]:
        yield event(error_body(error))

    def _deltas(self, answer: Answer, teller: Teller) -> Iterator[dict[str, Any]]:
        """One choice; its log-probs come with its text, or at its end where there is none."""
        log_probs: dict[str, Any] = {"logprobs": self.log_probs(answer, teller)}
        yield {"delta": {"role": "assistant", "content": ""}} | _NONE
        if answer.reasoning is not None:
            yield {"delta": {"reasoning_content": answer.reasoning}} | _NONE
        if text := told_text(answer):
            yield {"delta": {"content": text}} | _NONE | log_probs
            log_probs = {}
        for number, call in enumerate(_message(answer).get("tool_calls", ())):
            yield {"delta": {"tool_calls": [{"index": number} | call]}} | _NONE
        end: dict[str, Any] = {"delta": {}, "logprobs": None, "finish_reason": _finish(answer)}
        yield end | log_probs | self.token_ids(answer)

    def log_probs(self, answer: Answer, teller: Teller) -> Mapping[str, Any] | None:
        if not self.call.wants_log_probs:
            return None
        return {"content": teller.log_probs(answer), "refusal": None}

    def token_ids(self, answer: Answer) -> dict[str, Any]:
        return {"token_ids": answer.ids.tolist()} if self.call.wants_ids else {}

    def prompt(self, ids: array[int] | None) -> dict[str, Any]:
        """The ids of the prompt, where they are asked for."""
        return {"prompt_token_ids": ids.tolist()} if self.call.wants_ids and ids else {}


def _head(completion_id: str, teller: Teller, kind: str) -> dict[str, Any]:
    return {
        "id": completion_id,
        "object": kind,
        "created": teller.created,
        "model": teller.model,
        "system_fingerprint": None,
    }


def _message(answer: Answer) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments_text(call)},
        }
        for call in valid_calls(answer)
    ]
    text = told_text(answer)
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    message["refusal"] = None
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _finish(answer: Answer) -> str:
    if answer.finish == "calls" and not valid_calls(answer):
        return "stop"
    return FINISH[answer.finish]


def _usage(completion: Completion) -> Mapping[str, Any]:
    read = len(completion.prompt_ids)
    sampled = sum(len(answer.ids) for answer in completion.answers)
    return {
        "prompt_tokens": read,
        "completion_tokens": sampled,
        "total_tokens": read + sampled,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
    }
