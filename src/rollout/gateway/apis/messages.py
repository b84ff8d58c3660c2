"""Anthropic's messages: what a body asks for, and the blocks and events that answer it."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import msgspec

from rollout.gateway.apis import reading
from rollout.gateway.apis.reading import FunctionTool, refuse
from rollout.gateway.apis.writing import (
    ApiRequest,
    ReplyContext,
    encode,
    format_event,
    format_ids,
)
from rollout.gateway.calls import (
    Answer,
    ClientCall,
    ClientMessage,
    Completion,
    GatewayError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FINISH = {
    "stop": "end_turn",
    "length": "max_tokens",
    "calls": "tool_use",
    "stop_string": "stop_sequence",
}
#: Begins a block of Claude Code's system prompt that differs from call to call.
BILLING = "x-anthropic-billing-header"
#: Blocks of tools that Anthropic's servers run; they can only be foreign.
SERVER_BLOCKS = ("server_tool_use", "mcp_tool_use", "redacted_thinking")
#: Agents compact their conversation when an error begins with this.
TOO_LONG = "prompt is too long: "
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "api_error",
}


class _Block(reading.Part):
    thinking: str | None = None
    signature: str | None = None
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: str | list[_Block] | None = None


class _Message(msgspec.Struct):
    role: Annotated[str, reading.match_one("user", "assistant", "system")]
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = msgspec.Raw(b"null")


class _ToolChoice(msgspec.Struct):
    type: Annotated[str, reading.match_one("auto", "any", "tool", "none")] = "auto"
    disable_parallel_tool_use: bool | None = None


class _Body(reading.Body):
    messages: list[_Message] = msgspec.field(default_factory=list)
    system: str | list[_Block] | None = None
    tools: Annotated[list[_Tool], msgspec.Meta(max_length=reading.MAX_TOOLS)] | None = None
    tool_choice: _ToolChoice | None = None
    max_tokens: reading.Tokens | None = None
    stop_sequences: reading.StopList | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(_Body)


def read_request(body: bytes, headers: Mapping[str, str]) -> MessagesRequest:
    """What a body asks for; of ``count_tokens`` too, which sets nothing that it could not."""
    reading.check_values(body)
    parsed = reading.decode(_DECODER, body)
    choice = parsed.tool_choice or _ToolChoice()
    system, is_claude_code = _read_system(parsed.system)
    forms = {
        "output_config.format": (parsed.output_config or {}).get("format"),
        "output_format": parsed.output_format,
    }
    # Of Claude Code's calls only those for titles must answer in a schema.
    is_json = "json_schema" in map(reading.read_type, forms.values())
    call = parsed.make_call(
        "messages",
        body,
        headers,
        messages=(*system, *_read_messages(parsed.messages)) if parsed.messages else (),
        tools=tuple(_read_tools(parsed.tools or ())),
        allows_calls=choice.type != "none",
        parallel_calls=not choice.disable_parallel_tool_use,
        max_new_tokens=parsed.max_tokens,
        stop=parsed.stop_sequences,
        is_title=is_claude_code and is_json,
        forced_by=reading.list_forcing(tool_choice=choice.type, **forms),
    )
    keep_alive = format_event({"type": "ping"}, "ping")
    return MessagesRequest(call=call, parsed=parsed, keep_alive=keep_alive)


def _read_tools(tools: Sequence[_Tool]) -> Iterator[Mapping[str, Any]]:
    for index, tool in enumerate(tools):
        if tool.type in (None, "custom"):
            function = FunctionTool(tool.name, tool.description, tool.input_schema)
            yield reading.make_schema(function, f"tools[{index}]", "input_schema")


def _read_system(system: str | list[_Block] | None) -> tuple[tuple[ClientMessage, ...], bool]:
    """The system message without what changes from call to call; whether Claude Code sent it."""
    texts = [block.text or "" for block in system] if isinstance(system, list) else [system or ""]
    lasting = [text for text in texts if text and not text.startswith(BILLING)]
    message = ClientMessage(role="system", text="\n".join(lasting))
    is_claude_code = isinstance(system, list) and any(text.startswith(BILLING) for text in texts)
    return ((message,) if lasting else ()), is_claude_code


def _read_messages(messages: Sequence[_Message]) -> Iterator[ClientMessage]:
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        path, blocks = f"messages[{index}].content", message.content
        if isinstance(blocks, str):
            yield ClientMessage(role=message.role, text=blocks)
        elif message.role == "assistant":
            turn = _read_turn(blocks, path)
            names.update((call.id, call.name) for call in turn.calls)
            yield turn
        else:
            yield from _read_blocks(message.role, blocks, names, path)


def _read_turn(blocks: Sequence[_Block], path: str) -> ClientMessage:
    texts, thoughts, calls, ids = [], [], [], []
    for number, block in enumerate(blocks):
        field = f"{path}[{number}]"
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
            ids += [block.signature] if block.signature else []
        elif block.type == "tool_use":
            arguments = reading.decode_value(block.input, field)
            calls.append(ClientCall(block.name, arguments, block.id))
        elif block.type not in SERVER_BLOCKS and not block.type.endswith("_tool_result"):
            refuse(f"{field}.type", f"{block.type!r}: only text, thinking and tool_use are served")
    return ClientMessage(
        role="assistant",
        text="\n".join(texts),
        reasoning="\n".join(thoughts) if thoughts else None,
        calls=tuple(calls),
        ids=tuple(ids),
    )


def _read_blocks(
    role: str, blocks: Sequence[_Block], names: Mapping[str, str], path: str
) -> Iterator[ClientMessage]:
    """A user's message: results of tools, each a message, and texts between them."""
    if not blocks:
        yield ClientMessage(role=role)
    for is_result, run in groupby(enumerate(blocks), lambda each: each[1].type == "tool_result"):
        numbers, parts = zip(*run, strict=True)
        if not is_result:
            yield reading.make_message(role, parts, path, numbers[0])
            continue
        for number, block in zip(numbers, parts, strict=True):
            yield reading.make_message(
                "tool",
                block.content,
                f"{path}[{number}].content",
                call_id=block.tool_use_id,
                name=names.get(block.tool_use_id),
            )


def format_error(error: GatewayError) -> Mapping[str, Any]:
    """An error as this API has it."""
    message = str(error)
    if error.code == "context_length" and not message.startswith(TOO_LONG):
        message = TOO_LONG + message
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


@attrs.frozen(kw_only=True)
class MessagesRequest(ApiRequest):
    """A body that was read."""

    def format_body(self, completion: Completion, context: ReplyContext) -> Mapping[str, Any]:
        (answer,) = completion.answers
        message = _format_message(completion, context, _format_usage(completion))
        message |= {"content": list(_list_blocks(answer))} | _format_end(answer)
        return message | format_ids(completion, answer, self.call)

    def format_events(self, completion: Completion, context: ReplyContext) -> Iterator[bytes]:
        """Each block begun, filled by one delta, and ended."""
        (answer,) = completion.answers
        usage = _format_usage(completion)
        message = _format_message(completion, context, {**usage, "output_tokens": 0})
        yield _format_event("message_start", message=message)
        for index, block in enumerate(_list_blocks(answer)):
            empty, deltas = _split_block(block, answer)
            yield _format_event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _format_event("content_block_delta", index=index, delta=delta)
            yield _format_event("content_block_stop", index=index)
        delta = _format_end(answer) | format_ids(completion, answer, self.call)
        yield _format_event("message_delta", delta=delta, usage=usage)
        yield _format_event("message_stop")

    def format_failure(self, error: GatewayError, context: ReplyContext) -> Iterator[bytes]:
        yield format_event(format_error(error), "error")


def _format_event(kind: str, **data: Any) -> bytes:
    return format_event({"type": kind} | data, kind)


def _format_message(
    completion: Completion, context: ReplyContext, usage: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "id": completion.id,
        "type": "message",
        "role": "assistant",
        "model": context.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _format_end(answer: Answer) -> dict[str, Any]:
    return {"stop_reason": FINISH[answer.finish], "stop_sequence": answer.stop_string}


def _list_blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    if answer.reasoning is not None:
        yield {"type": "thinking", "thinking": answer.reasoning, "signature": answer.id}
    if answer.client_text:
        yield {"type": "text", "text": answer.client_text}
    for call in answer.valid_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}


def _split_block(
    block: dict[str, Any], answer: Answer
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and the deltas that fill it."""
    if block["type"] == "thinking":
        thought = [{"type": "thinking_delta", "thinking": block["thinking"]}]
        signature = {"type": "signature_delta", "signature": answer.id}
        deltas = [*(thought if block["thinking"] else []), signature]
        return block | {"thinking": "", "signature": ""}, deltas
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    arguments = encode(block["input"]).decode()
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _format_usage(completion: Completion) -> dict[str, Any]:
    """As Anthropic counts: cached tokens are not among `input_tokens`."""
    return {
        "input_tokens": len(completion.prompt_ids) - completion.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": completion.cached_tokens,
        "output_tokens": completion.sampled_tokens,
    }
