"""The answers of OpenAI's responses: items, and the events that build them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.gateway.apis.response_output import Tools, message_item, opened, reasoning_item
from rollout.gateway.apis.writing import (
    COMMENT,
    Teller,
    event,
    ids_of,
    openai_error,
    valid_calls,
)
from rollout.gateway.calls import Answer, Completion, GatewayCall, GatewayError, told_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


#: The end of its type, and its data.
Event = tuple[str, dict[str, Any]]
#: A sign of life that is an event.
KEEP_ALIVE = event({"type": "keepalive"}, "keepalive")


def error_body(error: GatewayError) -> Mapping[str, Any]:
    """An error, as this API tells it."""
    return openai_error(error)


class ResponsesRequest:
    """A body that was read; see `ApiRequest`.

    Attributes:
        tells_length_in_events: Whether an over-long prompt is told in the stream, where Codex
            looks for it.
        keep_alive: See `ApiRequest`; Codex counts events only, and skips those that it does not
            know.
        tools: Those of the body.
    """

    def __init__(
        self,
        call: GatewayCall,
        *,
        model: str | None,
        is_streamed: bool,
        tools: Tools,
        echoed: Mapping[str, Any],
        is_codex: bool,
    ) -> None:
        self.call = call
        self.model = model
        self.is_streamed = is_streamed
        self.tells_length_in_events = is_streamed and is_codex
        self.tools = tools
        self.keep_alive = KEEP_ALIVE if is_codex else COMMENT
        self._echoed = echoed

    def body(self, completion: Completion, teller: Teller) -> Mapping[str, Any]:
        """The whole answer."""
        (answer,) = completion.answers
        is_whole = answer.finish != "length"
        more = {
            "status": "completed" if is_whole else "incomplete",
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": list(self._items(answer, teller)),
            "usage": _usage(completion),
        }
        ids = ids_of(completion, answer) if self.call.wants_ids else {}
        return self.head(completion.id, teller) | more | ids

    def events(self, completion: Completion, teller: Teller) -> Iterator[bytes]:
        """Each item added, said in one delta, and done."""
        (answer,) = completion.answers
        head = self.head(completion.id, teller)
        events: list[Event] = [("created", {"response": head}), ("in_progress", {"response": head})]
        for index, item in enumerate(self._items(answer, teller)):
            events += _item_events(index, item)
        body = self.body(completion, teller)
        events.append((str(body["status"]), {"response": body}))
        return _number(events)

    def failure_events(self, error: GatewayError, teller: Teller) -> Iterator[bytes]:
        told = error_body(error)["error"]
        if not self.tells_length_in_events:
            yield event({"type": "error", "error": told, "sequence_number": 0}, "error")
            return
        head = self.head("", teller)
        why = {"code": told["code"], "message": told["message"]}
        failed = head | {"status": "failed", "error": why}
        begun: list[Event] = [("created", {"response": head}), ("in_progress", {"response": head})]
        yield from _number([*begun, ("failed", {"response": failed})])

    def head(self, response_id: str, teller: Teller) -> dict[str, Any]:
        return {
            "id": response_id,
            "object": "response",
            "created_at": teller.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": teller.model,
            "output": [],
            "usage": None,
            **self._echoed,
        }

    def _items(self, answer: Answer, teller: Teller) -> Iterator[dict[str, Any]]:
        if answer.reasoning is not None:
            yield reasoning_item(answer.id, answer.reasoning)
        text, calls = told_text(answer), valid_calls(answer)
        if text or not calls:
            yield message_item(answer.id, text, self.log_probs(answer, teller))
        for call in calls:
            yield self.tools.item(call)

    def log_probs(self, answer: Answer, teller: Teller) -> list[dict[str, Any]]:
        """Of its text, where they are asked for."""
        return teller.log_probs(answer) if self.call.wants_log_probs else []


def _number(events: Sequence[Event]) -> Iterator[bytes]:
    for number, (end, data) in enumerate(events):
        kind = f"response.{end}"
        yield event({"type": kind, "sequence_number": number} | data, kind)


def _item_events(index: int, item: Mapping[str, Any]) -> list[Event]:
    """One item of the output: added, its parts in one delta each, done."""
    place = {"output_index": index}
    inside = place | {"item_id": item["id"]}
    parts: list[Event] = []
    if item["type"] == "reasoning":
        (part,) = item["summary"]
        text, summary, content = part["text"], {"summary_index": 0}, {"content_index": 0}
        parts = [
            ("reasoning_summary_part.added", inside | summary | {"part": part | {"text": ""}}),
            ("reasoning_summary_text.delta", inside | summary | {"delta": text}),
            ("reasoning_text.delta", inside | content | {"delta": text}),
            ("reasoning_summary_text.done", inside | summary | {"text": text}),
            ("reasoning_summary_part.done", inside | summary | {"part": part}),
            ("reasoning_text.done", inside | content | {"text": text}),
        ]
        parts = parts if text else [each for each in parts if not each[0].endswith(".delta")]
    elif item["type"] == "message":
        (part,) = item["content"]
        text, log_probs, inside = part["text"], part["logprobs"], inside | {"content_index": 0}
        empty = part | {"text": "", "logprobs": []}
        parts = [
            ("content_part.added", inside | {"part": empty}),
            ("output_text.delta", inside | {"delta": text, "logprobs": []}),
            ("output_text.done", inside | {"text": text, "logprobs": log_probs}),
            ("content_part.done", inside | {"part": part}),
        ]
        parts = parts if text else [each for each in parts if not each[0].endswith(".delta")]
    elif item["type"] == "function_call":
        named = {"arguments": item["arguments"], "name": item["name"]}
        parts = [
            ("function_call_arguments.delta", inside | {"delta": item["arguments"]}),
            ("function_call_arguments.done", inside | named),
        ]
    else:
        parts = [
            ("custom_tool_call_input.delta", inside | {"delta": item["input"]}),
            ("custom_tool_call_input.done", inside | {"input": item["input"]}),
        ]
    return [
        ("output_item.added", place | {"item": opened(item)}),
        *parts,
        ("output_item.done", place | {"item": item}),
    ]


def _usage(completion: Completion) -> Mapping[str, Any]:
    read = len(completion.prompt_ids)
    sampled = sum(len(answer.ids) for answer in completion.answers)
    return {
        "input_tokens": read,
        "input_tokens_details": {
            "cached_tokens": completion.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + sampled,
    }
