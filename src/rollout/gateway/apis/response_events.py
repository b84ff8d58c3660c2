"""The answers of OpenAI's responses: items, and the events that build them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rollout.gateway.apis.response_items import CALL_ID, MESSAGE_ID, REASONING_ID, sealed
from rollout.gateway.apis.writing import (
    COMMENT,
    Teller,
    arguments_text,
    event,
    ids_of,
    openai_error,
    valid_calls,
)
from rollout.gateway.calls import Answer, Completion, GatewayCall, GatewayError, told_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollout.types import ToolCall


class _Origin(NamedTuple):
    """How the client knows a tool."""

    name: str
    space: str
    is_text: bool


class Tools:
    """The tools of a body, under the names that the model sees.

    Attributes:
        schemas: As `GatewayCall.tools`.
    """

    def __init__(self) -> None:
        self.schemas: list[Mapping[str, Any]] = []
        self._origins: dict[str, _Origin] = {}

    def add(
        self, schema: Mapping[str, Any], name: str, space: str, *, is_text: bool = False
    ) -> None:
        """Offer a tool; one of a namespace has that in its name."""
        flat = self.flat_name(name, space)
        function = {**schema["function"], "name": flat}
        self.schemas.append({**schema, "function": function})
        self._origins[flat] = _Origin(name, space, is_text)

    def update(self, other: Tools) -> None:
        """Offer those of another collection too."""
        self.schemas += other.schemas
        self._origins |= other._origins

    @staticmethod
    def flat_name(name: str, space: str | None) -> str:
        """The name of a tool for the model."""
        return f"{space.rstrip('_')}__{name}" if space else name

    def item(self, call: ToolCall) -> dict[str, Any]:
        """A call in the form of the tool that it is of."""
        origin = self._origins.get(call.name, _Origin(call.name, "", False))
        item = {"id": f"{CALL_ID}{call.id}", "call_id": call.id, "name": origin.name}
        if origin.space:
            item["namespace"] = origin.space
        text = call.arguments.get("input")
        if origin.is_text:
            said = text if isinstance(text, str) else arguments_text(call)
            return {"type": "custom_tool_call", **item, "input": said, "status": "completed"}
        arguments = arguments_text(call)
        return {"type": "function_call", **item, "arguments": arguments, "status": "completed"}


def error_body(error: GatewayError) -> Mapping[str, Any]:
    """An error, as this API tells it."""
    return openai_error(error)


class ResponsesRequest:
    """A body that was read; see `ApiRequest`.

    Attributes:
        tells_length_in_events: Whether an over-long prompt is told in the stream, where Codex
            looks for it.
    """

    keep_alive = COMMENT

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
        self._tools = tools
        self._echoed = echoed
        self._number = 0

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
        return self._head(completion.id, teller) | more | ids

    def events(self, completion: Completion, teller: Teller) -> Iterator[bytes]:
        """Each item added, told in one difference, and done."""
        (answer,) = completion.answers
        head = self._head(completion.id, teller)
        yield self._event("response.created", response=head)
        yield self._event("response.in_progress", response=head)
        for index, item in enumerate(self._items(answer, teller)):
            place = {"output_index": index}
            yield self._event("response.output_item.added", **place, item=_opened(item))
            yield from self._filling(item, place | {"item_id": item["id"]})
            yield self._event("response.output_item.done", **place, item=item)
        whole = self.body(completion, teller)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failure(self, error: GatewayError, teller: Teller) -> bytes:
        """The end of a stream that has begun already."""
        told = error_body(error)["error"]
        head = self._head("", teller) | {"status": "failed"}
        failed = head | {"error": {"code": told["code"], "message": told["message"]}}
        created = self._event("response.created", response=self._head("", teller))
        if self.tells_length_in_events:
            return created + self._event("response.failed", response=failed)
        return event({"type": "error", "error": told, "sequence_number": self._number}, "error")

    def _event(self, kind: str, **data: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number} | data
        self._number += 1
        return event(numbered, kind)

    def _head(self, response_id: str, teller: Teller) -> dict[str, Any]:
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
            yield {
                "type": "reasoning",
                "id": f"{REASONING_ID}{answer.id}",
                # Some clients show summaries only, others give back nothing but the thought itself.
                "summary": [{"type": "summary_text", "text": answer.reasoning}],
                "content": [{"type": "reasoning_text", "text": answer.reasoning}],
                "encrypted_content": sealed(answer.id, answer.reasoning),
                "status": "completed",
            }
        text, calls = told_text(answer), valid_calls(answer)
        if text or not calls:
            log_probs = teller.log_probs(answer) if self.call.wants_log_probs else []
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}
            yield {
                "type": "message",
                "id": f"{MESSAGE_ID}{answer.id}",
                "role": "assistant",
                "content": [part],
                "status": "completed",
            }
        for call in calls:
            yield self._tools.item(call)

    def _filling(self, item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[bytes]:
        kind = item["type"]
        if kind == "reasoning":
            (part,) = item["summary"]
            where = {**place, "summary_index": 0}
            stem = "response.reasoning_summary"
            empty = {**part, "text": ""}
            yield self._event(f"{stem}_part.added", **where, part=empty)
            yield self._event(f"{stem}_text.delta", **where, delta=part["text"])
            yield self._event(f"{stem}_text.done", **where, text=part["text"])
            yield self._event(f"{stem}_part.done", **where, part=part)
            where = {**place, "content_index": 0}
            yield self._event("response.reasoning_text.delta", **where, delta=part["text"])
            yield self._event("response.reasoning_text.done", **where, text=part["text"])
        elif kind == "message":
            (part,) = item["content"]
            where = {**place, "content_index": 0}
            told = {"logprobs": part["logprobs"]}
            empty = {**part, "text": "", "logprobs": []}
            yield self._event("response.content_part.added", **where, part=empty)
            yield self._event("response.output_text.delta", **where, delta=part["text"], **told)
            yield self._event("response.output_text.done", **where, text=part["text"], **told)
            yield self._event("response.content_part.done", **where, part=part)
        elif kind == "function_call":
            stem = "response.function_call_arguments"
            text = item["arguments"]
            yield self._event(f"{stem}.delta", **place, delta=text)
            yield self._event(f"{stem}.done", **place, arguments=text, name=item["name"])
        else:
            stem = "response.custom_tool_call_input"
            yield self._event(f"{stem}.delta", **place, delta=item["input"])
            yield self._event(f"{stem}.done", **place, input=item["input"])


def _opened(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """An item as it is added, before it is filled."""
    return {**item, **_EMPTY[item["type"]], "status": "in_progress"}


_EMPTY: Mapping[str, Mapping[str, Any]] = {
    "reasoning": {"summary": [], "content": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
}


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
