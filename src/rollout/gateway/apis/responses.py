"""OpenAI's responses: what a body asks for, and the items and events that answer it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import attrs
import msgspec

from rollout.gateway.apis import reading
from rollout.gateway.apis.reading import FunctionTool
from rollout.gateway.apis.response_items import (
    CALL_ID,
    MESSAGE_ID,
    REASONING_ID,
    Item,
    flatten_name,
    read_items,
    seal_reasoning,
)
from rollout.gateway.apis.writing import (
    COMMENT,
    ApiRequest,
    ReplyContext,
    format_event,
    format_ids,
    format_openai_error,
    write_arguments,
    write_text_input,
)
from rollout.gateway.calls import Answer, ClientMessage, Completion

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout.gateway.calls import GatewayError
    from rollout.types import ToolCall

LOG_PROBS = "message.output_text.logprobs"

#: The end of its type, and its data.
Event = tuple[str, dict[str, Any]]


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    tools: list[_Tool] | None = None


class _Body(reading.OpenAIBody):
    input: str | list[Item] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[_Tool], msgspec.Meta(max_length=reading.MAX_TOOLS)] | None = None
    text: Any = None
    include: list[str] | None = None
    max_output_tokens: reading.Tokens | None = None
    metadata: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(_Body)


def read_request(body: bytes, headers: Mapping[str, str]) -> ResponsesRequest:
    """What a body asks for."""
    reading.check_values(body)
    parsed = reading.decode(_DECODER, body)
    tools = list(_read_tools(parsed.tools or ()))
    forms = {"tool_choice": parsed.tool_choice}
    if isinstance(parsed.text, dict):
        forms["text.format"] = parsed.text.get("format")
    call = parsed.make_call(
        "responses",
        body,
        headers,
        messages=_read_messages(parsed),
        tools=tuple(tool.schema for tool in tools),
        text_tools=frozenset(tool.flat_name for tool in tools if tool.is_text),
        allows_calls=reading.read_type(parsed.tool_choice) != "none",
        parallel_calls=parsed.parallel_tool_calls is not False,
        max_new_tokens=parsed.max_output_tokens,
        top_log_probs=parsed.top_logprobs,
        stop=parsed.stop,
        previous_id=parsed.previous_response_id,
        wants_log_probs=LOG_PROBS in (parsed.include or ()) or parsed.top_logprobs is not None,
        forced_by=reading.list_forcing(**forms),
    )
    is_codex = headers.get("originator", "").startswith("codex")
    return ResponsesRequest(
        call=call,
        parsed=parsed,
        # Codex counts events only, and skips those that it does not know.
        keep_alive=format_event({"type": "keepalive"}, "keepalive") if is_codex else COMMENT,
        has_length_in_events=is_codex,
        tools={tool.flat_name: tool for tool in tools},
    )


class ClientTool(NamedTuple):
    """A tool as the model sees it, and as the client knows it.

    Attributes:
        schema: As in `GatewayCall.tools`.
        name, space: The client's name, and that of its namespace, "" where it has none.
        is_text: Whether it takes plain text.
    """

    schema: Mapping[str, Any]
    name: str
    space: str
    is_text: bool

    @property
    def flat_name(self) -> str:
        """The model's name for it."""
        return str(self.schema["function"]["name"])


#: Of a tool that takes free text: to the model it is a function with the one argument `input`.
_TEXT_SCHEMA = msgspec.Raw(
    b'{"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}'
)


def _read_tools(
    tools: Sequence[_Tool], space: str = "", within: str = "tools"
) -> Iterator[ClientTool]:
    """Functions, tools of free text and namespaces of both; others are run by servers."""
    for index, tool in enumerate(tools):
        path, is_text = f"{within}[{index}]", tool.type == "custom"
        if is_text or tool.type == "function":
            function = FunctionTool(tool.name, tool.description, tool.parameters)
            if is_text:
                function = FunctionTool(tool.name, tool.description or "", _TEXT_SCHEMA)
            schema = reading.make_schema(function, path)
            flat = flatten_name(tool.name, space)
            schema = {**schema, "function": {**schema["function"], "name": flat}}
            yield ClientTool(schema, tool.name, space, is_text)
        elif tool.type == "namespace" and not space:
            yield from _read_tools(tool.tools or (), tool.name, f"{path}.tools")


def _read_messages(parsed: _Body) -> tuple[ClientMessage, ...]:
    messages: tuple[ClientMessage, ...] = ()
    if not isinstance(parsed.input, str):
        messages = read_items(parsed.input)
    elif parsed.input:
        messages = (ClientMessage(role="user", text=parsed.input),)
    if not messages or not parsed.instructions:
        return messages
    system = ClientMessage(role="system", text=parsed.instructions, is_instructions=True)
    return (system, *messages)


@attrs.frozen(kw_only=True)
class ResponsesRequest(ApiRequest):
    """A body that was read.

    Attributes:
        tools: Those of the body, by the names that the model sees.
    """

    parsed: _Body
    tools: Mapping[str, ClientTool]

    def format_body(self, completion: Completion, context: ReplyContext) -> Mapping[str, Any]:
        (answer,) = completion.answers
        is_cut = answer.finish == "length"
        return {
            **self._format_head(completion.id, context),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(self._list_items(answer, context)),
            "usage": _format_usage(completion),
            **format_ids(completion, answer, self.call),
        }

    def format_events(self, completion: Completion, context: ReplyContext) -> Iterator[bytes]:
        """Each item added, filled by one delta, and done."""
        (answer,) = completion.answers
        events = self._begin_events(completion.id, context)
        for index, item in enumerate(self._list_items(answer, context)):
            events += _list_item_events(index, item)
        body = dict(self.format_body(completion, context))
        events.append((body["status"], {"response": body}))
        return _number_events(events)

    def format_failure(self, error: GatewayError, context: ReplyContext) -> Iterator[bytes]:
        fault = format_openai_error(error)["error"]
        if not self.has_length_in_events:
            yield format_event({"type": "error", "error": fault, "sequence_number": 0}, "error")
            return
        why = {"code": fault["code"], "message": fault["message"]}
        failed = self._format_head("", context) | {"status": "failed", "error": why}
        begin = self._begin_events("", context)
        yield from _number_events([*begin, ("failed", {"response": failed})])

    def _begin_events(self, response_id: str, context: ReplyContext) -> list[Event]:
        head = self._format_head(response_id, context)
        return [("created", {"response": head}), ("in_progress", {"response": head})]

    def _format_head(self, response_id: str, context: ReplyContext) -> dict[str, Any]:
        """What does not depend on the answer; much of it repeats the question."""
        parsed, choice = self.parsed, self.parsed.tool_choice
        return {
            "id": response_id,
            "object": "response",
            "created_at": context.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": context.model,
            "output": [],
            "usage": None,
            "instructions": parsed.instructions,
            "max_output_tokens": parsed.max_output_tokens,
            "metadata": parsed.metadata or {},
            "parallel_tool_calls": self.call.parallel_calls,
            "previous_response_id": parsed.previous_response_id,
            "temperature": parsed.temperature,
            "tool_choice": choice if isinstance(choice, str) else "auto",
            "tools": [],
            "top_p": parsed.top_p,
            "truncation": "disabled",
        }

    def _list_items(self, answer: Answer, context: ReplyContext) -> Iterator[dict[str, Any]]:
        status = {"status": "completed"}
        if answer.reasoning is not None:
            text = answer.reasoning
            yield {
                "type": "reasoning",
                "id": f"{REASONING_ID}{answer.id}",
                # Some clients show summaries only, others give back nothing but the thought.
                "summary": [{"type": "summary_text", "text": text}],
                "content": [{"type": "reasoning_text", "text": text}],
                "encrypted_content": seal_reasoning(answer.id, text),
            } | status
        text, calls = answer.client_text, answer.valid_calls
        if text or not calls:
            log_probs = context.format_log_probs(answer) if self.call.wants_log_probs else []
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}
            item_id = f"{MESSAGE_ID}{answer.id}"
            item = {"type": "message", "id": item_id, "role": "assistant", "content": [part]}
            yield item | status
        for call in calls:
            yield self._format_call(call) | status

    def _format_call(self, call: ToolCall) -> dict[str, Any]:
        """A call in the form of the tool that it is of."""
        tool = self.tools.get(call.name)
        item = {"id": f"{CALL_ID}{call.id}", "call_id": call.id, "name": call.name}
        if tool is not None:
            item |= {"name": tool.name} | ({"namespace": tool.space} if tool.space else {})
            if tool.is_text:
                return {"type": "custom_tool_call", **item, "input": write_text_input(call)}
        return {"type": "function_call", **item, "arguments": write_arguments(call)}


def _number_events(events: Sequence[Event]) -> Iterator[bytes]:
    for number, (end, data) in enumerate(events):
        kind = f"response.{end}"
        yield format_event({"type": kind, "sequence_number": number} | data, kind)


def _list_item_events(index: int, item: Mapping[str, Any]) -> list[Event]:
    """One item of the output: added, its parts in one delta each, done."""
    position = {"output_index": index}
    inside = position | {"item_id": item["id"]}
    if item["type"] == "reasoning":
        empty: dict[str, Any] = {"summary": [], "content": []}
        (part,) = item["summary"]
        text, summary, content = part["text"], {"summary_index": 0}, {"content_index": 0}
        parts: list[Event] = [
            ("reasoning_summary_part.added", inside | summary | {"part": part | {"text": ""}}),
            ("reasoning_summary_text.delta", inside | summary | {"delta": text}),
            ("reasoning_text.delta", inside | content | {"delta": text}),
            ("reasoning_summary_text.done", inside | summary | {"text": text}),
            ("reasoning_summary_part.done", inside | summary | {"part": part}),
            ("reasoning_text.done", inside | content | {"text": text}),
        ]
    elif item["type"] == "message":
        empty = {"content": []}
        (part,) = item["content"]
        text, log_probs, inside = part["text"], part["logprobs"], inside | {"content_index": 0}
        parts = [
            ("content_part.added", inside | {"part": part | {"text": "", "logprobs": []}}),
            ("output_text.delta", inside | {"delta": text, "logprobs": []}),
            ("output_text.done", inside | {"text": text, "logprobs": log_probs}),
            ("content_part.done", inside | {"part": part}),
        ]
    else:
        is_function = item["type"] == "function_call"
        field, more = ("arguments", {"name": item["name"]}) if is_function else ("input", {})
        kind, empty, text = f"{item['type']}_{field}", {field: ""}, item[field]
        parts = [
            (f"{kind}.delta", inside | {"delta": text}),
            (f"{kind}.done", inside | {field: text} | more),
        ]
    if not text:
        parts = [each for each in parts if not each[0].endswith(".delta")]
    return [
        ("output_item.added", position | {"item": {**item, **empty, "status": "in_progress"}}),
        *parts,
        ("output_item.done", position | {"item": item}),
    ]


def _format_usage(completion: Completion) -> Mapping[str, Any]:
    read, sampled = len(completion.prompt_ids), completion.sampled_tokens
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
