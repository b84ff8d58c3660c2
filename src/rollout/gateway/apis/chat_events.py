"""The answers of OpenAI's chat completions: choices, and the events that build them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.gateway.apis.writing import (
    COMMENT,
    AnswerStream,
    Teller,
    Telling,
    arguments_text,
    event,
    openai_error,
    valid_calls,
)
from rollout.gateway.calls import Answer, Completion, Draft, GatewayCall, GatewayError, told_text

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Mapping

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

    def stream(self, teller: Teller) -> AnswerStream:
        """Of each choice what the whole would say, as differences."""
        return _ChatStream(self, teller, tells_usage=self._tells_usage)

    def log_probs(self, answer: Answer, teller: Teller) -> Mapping[str, Any] | None:
        if not self.call.wants_log_probs:
            return None
        return {"content": teller.log_probs(answer), "refusal": None}

    def token_ids(self, answer: Answer) -> dict[str, Any]:
        return {"token_ids": answer.ids.tolist()} if self.call.wants_ids else {}

    def prompt(self, ids: array[int] | None) -> dict[str, Any]:
        """The ids of the prompt, where they are asked for."""
        return {"prompt_token_ids": ids.tolist()} if self.call.wants_ids and ids else {}


_NONE: dict[str, Any] = {"logprobs": None, "finish_reason": None}


class _ChatStream:
    """See `AnswerStream`."""

    def __init__(self, request: ChatRequest, teller: Teller, *, tells_usage: bool) -> None:
        self._request = request
        self._teller = teller
        self._tells_usage = tells_usage
        self._id = ""
        self._tellings: dict[int, Telling] = {}
        self._prompt: dict[str, Any] | None = None

    def more(self, draft: Draft) -> bytes:
        self._begin(draft.id, draft.prompt_ids)
        return b"".join(
            self._chunk(index, choice)
            for index, said in enumerate(draft.answers)
            if said is not None
            for choice in self._deltas(index, said.text, said.reasoning)
        )

    def end(self, completion: Completion) -> bytes:
        self._begin(completion.id, completion.prompt_ids)
        events = [
            self._chunk(index, choice)
            for index, answer in enumerate(completion.answers)
            for choice in self._rest(index, answer)
        ]
        if self._tells_usage:
            events.append(event(self._head() | {"choices": [], "usage": _usage(completion)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def failure(self, error: GatewayError) -> bytes:
        return event(error_body(error))

    def _begin(self, completion_id: str, prompt_ids: array[int] | None) -> None:
        self._id = completion_id
        if self._prompt is None:
            self._prompt = self._request.prompt(prompt_ids)

    def _head(self) -> dict[str, Any]:
        return _head(self._id, self._teller, "chat.completion.chunk")

    def _chunk(self, index: int, choice: dict[str, Any]) -> bytes:
        rest = {"usage": None} if self._tells_usage else {}
        prompt, self._prompt = self._prompt or {}, {}
        return event(self._head() | {"choices": [{"index": index} | choice]} | rest | prompt)

    def _deltas(
        self,
        index: int,
        text: str,
        reasoning: str | None,
        log_probs: dict[str, Any] = _NONE,
    ) -> Iterator[dict[str, Any]]:
        """What is new of one choice."""
        if index not in self._tellings:
            self._tellings[index] = Telling()
            yield {"delta": {"role": "assistant", "content": ""}} | _NONE
        telling = self._tellings[index]
        is_first = telling.reasoning is None
        thought = telling.more_reasoning(reasoning)
        if thought or (thought is not None and is_first):
            yield {"delta": {"reasoning_content": thought}} | _NONE
        said = telling.more_text(text)
        if said:
            yield {"delta": {"content": said}} | _NONE | log_probs

    def _rest(self, index: int, answer: Answer) -> Iterator[dict[str, Any]]:
        """What is left of one choice, its log-probs with the last of its text."""
        log_probs: dict[str, Any] = {"logprobs": self._request.log_probs(answer, self._teller)}
        for choice in self._deltas(index, told_text(answer), answer.reasoning, log_probs):
            yield choice
            if "content" in choice["delta"] and choice["delta"]["content"]:
                log_probs = {}
        for number, call in enumerate(_message(answer).get("tool_calls", ())):
            yield {"delta": {"tool_calls": [{"index": number} | call]}} | _NONE
        end: dict[str, Any] = {"delta": {}, "logprobs": None, "finish_reason": _finish(answer)}
        yield end | log_probs | self._request.token_ids(answer)


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
