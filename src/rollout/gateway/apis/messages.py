"""Anthropic's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout.gateway.apis import reading
from rollout.gateway.apis.reading import FunctionTool, refuse
from rollout.gateway.apis.writing import (
    Teller,
    encode,
    event,
    ids_of,
    valid_calls,
)
from rollout.gateway.calls import (
    Answer,
    Completion,
    GatewayCall,
    GatewayError,
    GivenCall,
    GivenMessage,
    told_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROUTE = "messages"
ROLES = ("user", "assistant", "system")
FINISH = {
    "stop": "end_turn",
    "length": "max_tokens",
    "calls": "tool_use",
    "stop_string": "stop_sequence",
}
#: Begins a block of Claude Code's system prompt that differs from call to call.
BILLING = "x-anthropic-billing-header"
#: Agents compact their conversation when an error begins with this.
TOO_LONG = "prompt is too long: "
#: Blocks of tools that Anthropic's servers run; they can only be foreign.
SERVER_BLOCKS = ("server_tool_use", "mcp_tool_use", "redacted_thinking")


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: str | list[_Block] | None = None
    source: Any = None
    is_error: bool | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = msgspec.Raw(b"null")


class _ToolChoice(msgspec.Struct):
    type: str = "auto"
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _Format(msgspec.Struct):
    type: str = ""


class _OutputConfig(msgspec.Struct):
    format: _Format | None = None


class _Body(reading.Body):
    messages: list[_Message] = msgspec.field(default_factory=list)
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    max_tokens: reading.Tokens | None = None
    stop_sequences: list[str] | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None


_DECODER = msgspec.json.Decoder(_Body)


def read(body: bytes, headers: Mapping[str, str]) -> MessagesRequest:
    """What a body asks for; of ``count_tokens`` too, which sets nothing that it could not.

    Raises:
        GatewayError: It cannot be served.
    """
    asked = reading.decoded(_DECODER, body)
    asked.refuse_impossible()
    tools = tuple(_tools(asked.tools or ()))
    choice = asked.tool_choice or _ToolChoice()
    system, is_claude_code = _system(asked.system)
    call = GatewayCall(
        api="messages",
        messages=(*system, *_messages(asked.messages)) if asked.messages else (),
        tools=tools,
        tool_choice=_tool_choice(choice, tools),
        parallel_calls=not choice.disable_parallel_tool_use,
        sampling=asked.sampling(max_new_tokens=asked.max_tokens),
        seed=reading.seed_of(asked.seed),
        stop=reading.stops_of(asked.stop_sequences, "stop_sequences"),
        agent_id=headers.get("x-claude-code-agent-id"),
        is_side=not tools
        and ((is_claude_code and _wants_json(asked)) or reading.asks_for_title(system)),
        wants_ids=bool(asked.return_token_ids),
        digest=reading.digest_of(ROUTE, body),
    )
    return MessagesRequest(reading.checked(call), asked)


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
}


def _wants_json(asked: _Body) -> bool:
    """Whether it must answer in a schema: of Claude Code's calls only those for titles do."""
    config = asked.output_config
    wanted = asked.output_format or (config.format if config is not None else None)
    return wanted is not None and wanted.type == "json_schema"


def _tools(given: Sequence[_Tool]) -> Iterator[Mapping[str, Any]]:
    for index, tool in enumerate(given):
        if tool.type in (None, "custom"):
            function = FunctionTool(tool.name, tool.description, tool.input_schema)
            yield reading.function_schema(function, f"tools[{index}].input_schema")


def _tool_choice(choice: _ToolChoice, tools: Sequence[Mapping[str, Any]]) -> str:
    if choice.type == "tool":
        return reading.chosen(choice.name, tools, "tool_choice.name")
    known = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type not in known:
        expected = "expected 'auto', 'any', 'none' or 'tool'"
        refuse("tool_choice.type", f"{choice.type!r}; {expected}")
    return known[choice.type]


def _system(given: str | list[_Block] | None) -> tuple[tuple[GivenMessage, ...], bool]:
    """The system message, without what changes from call to call; whether there was such."""
    if given is None or isinstance(given, str):
        return ((GivenMessage(role="system", text=given),) if given else ()), False
    texts = [block.text or "" for block in given]
    kept = [text for text in texts if text and not text.startswith(BILLING)]
    message = GivenMessage(role="system", text="\n".join(kept))
    return ((message,) if kept else ()), any(text.startswith(BILLING) for text in texts)


def _messages(given: Sequence[_Message]) -> Iterator[GivenMessage]:
    names: dict[str, str] = {}
    for index, message in enumerate(given):
        place = f"messages[{index}]"
        if message.role not in ROLES:
            refuse(f"{place}.role", f"{message.role!r}; expected one of {', '.join(ROLES)}")
        blocks = message.content
        if isinstance(blocks, str):
            yield GivenMessage(role=message.role, text=blocks)
        elif message.role == "assistant":
            said = _assistant(blocks, place)
            names.update((call.id, call.name) for call in said.calls)
            yield said
        else:
            yield from _spoken(message.role, blocks, names, place)


def _assistant(blocks: Sequence[_Block], place: str) -> GivenMessage:
    texts, thoughts, calls, ids = [], [], [], []
    for number, block in enumerate(blocks):
        field = f"{place}.content[{number}]"
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
            ids += [block.signature] if block.signature else []
        elif block.type == "tool_use":
            calls.append(GivenCall(block.name, reading.json_value(block.input, field), block.id))
        elif block.type not in SERVER_BLOCKS and not block.type.endswith("_tool_result"):
            refuse(f"{field}.type", f"{block.type!r}: only text, thinking and tool_use are served")
    return GivenMessage(
        role="assistant",
        text="\n".join(texts),
        reasoning="\n".join(thoughts) if thoughts else None,
        calls=tuple(calls),
        ids=tuple(ids),
    )


def _spoken(
    role: str, blocks: Sequence[_Block], names: Mapping[str, str], place: str
) -> Iterator[GivenMessage]:
    """What a user says: answers of tools, each a message, and texts between them."""
    parts: list[str | Mapping[str, Any]] = []
    for number, block in enumerate(blocks):
        field = f"{place}.content[{number}]"
        if block.type != "tool_result":
            parts.append(_shown(block, field))
            continue
        if parts:
            yield _given(role, parts)
            parts = []
        result = _result(block.content, f"{field}.content")
        yield GivenMessage(
            role="tool",
            text=result.text,
            parts=result.parts,
            call_id=block.tool_use_id,
            name=names.get(block.tool_use_id),
            is_error=bool(block.is_error),
        )
    if parts or not blocks:
        yield _given(role, parts)


def _given(role: str, parts: Sequence[str | Mapping[str, Any]]) -> GivenMessage:
    said = reading.shown(parts)
    return GivenMessage(role=role, text=said.text, parts=said.parts)


def _result(content: str | list[_Block] | None, field: str) -> reading.Shown:
    if content is None or isinstance(content, str):
        return reading.Shown(content or "")
    parts = [_shown(block, f"{field}[{index}]") for index, block in enumerate(content)]
    return reading.shown(parts)


def _shown(block: _Block, field: str) -> str | Mapping[str, Any]:
    if block.type == "text":
        return block.text or ""
    return reading.image_part(block.type, block.source, field)


class MessagesRequest:
    """A body that was read; see `ApiRequest`."""

    keep_alive = event({"type": "ping"}, "ping")

    def __init__(self, call: GatewayCall, asked: _Body) -> None:
        self.call = call
        self.model = asked.model
        self.is_streamed = bool(asked.stream)

    def body(self, completion: Completion, teller: Teller) -> Mapping[str, Any]:
        """The whole answer."""
        (answer,) = completion.answers
        message = _message(completion, teller) | {"content": list(_blocks(answer))} | _end(answer)
        return message | (ids_of(completion, answer) if self.call.wants_ids else {})

    def events(self, completion: Completion, teller: Teller) -> Iterator[bytes]:
        """Each block opened, told in one difference, and closed."""
        (answer,) = completion.answers
        opened = _message(completion, teller)
        opened["usage"] = opened["usage"] | {"output_tokens": 0}
        yield _event("message_start", message=opened)
        for index, block in enumerate(_blocks(answer)):
            empty, deltas = _opening(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        more = ids_of(completion, answer) if self.call.wants_ids else {}
        usage = _usage(completion)
        yield _event("message_delta", delta=_end(answer) | more, usage=usage)
        yield _event("message_stop")

    def failure(self, error: GatewayError, teller: Teller) -> bytes:
        """The end of a stream that has begun already."""
        return event(error_body(error), "error")


def count_body(tokens: int) -> Mapping[str, Any]:
    """What ``count_tokens`` answers."""
    return {"input_tokens": tokens}


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind} | data, kind)


def _message(completion: Completion, teller: Teller) -> dict[str, Any]:
    return {
        "id": completion.id,
        "type": "message",
        "role": "assistant",
        "model": teller.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(completion),
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


def _opening(block: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """A block as it is opened, and what fills it."""
    if block["type"] == "thinking":
        return {**block, "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    json = encode(block["input"]).decode()
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json}]


def _usage(completion: Completion) -> dict[str, Any]:
    """As Anthropic counts: what was cached is not among `input_tokens`."""
    sampled = sum(len(answer.ids) for answer in completion.answers)
    return {
        "input_tokens": len(completion.prompt_ids) - completion.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": completion.cached_tokens,
        "output_tokens": sampled,
    }
