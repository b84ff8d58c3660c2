"""Anthropic's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rollout.gateway.apis import reading
from rollout.gateway.apis.message_events import MessagesRequest, count_body, error_body
from rollout.gateway.apis.reading import FunctionTool, refuse
from rollout.gateway.calls import GatewayCall, GivenCall, GivenMessage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["ROUTE", "count_body", "error_body", "read"]

ROUTE = "messages"
ROLES = ("user", "assistant", "system")
#: Begins a block of Claude Code's system prompt that differs from call to call.
BILLING = "x-anthropic-billing-header"
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
    tools: Annotated[list[_Tool], msgspec.Meta(max_length=reading.MAX_TOOLS)] | None = None
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
    reading.refuse_many(asked.messages, "messages", "content")
    if isinstance(asked.system, list):
        reading.refuse_many(asked.system, "system", "content")
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
        forced_by=tuple(_forcing(asked)),
        digest=reading.digest_of(ROUTE, body),
        is_retry=reading.is_retry(headers),
    )
    return MessagesRequest(reading.checked(call), model=asked.model, is_streamed=bool(asked.stream))


def _forcing(asked: _Body) -> Iterator[str]:
    """The fields that would force the model."""
    config = asked.output_config
    if asked.tool_choice is not None and asked.tool_choice.type in ("any", "tool"):
        yield "tool_choice"
    if config is not None and config.format is not None:
        yield "output_config.format"
    if asked.output_format is not None:
        yield "output_format"


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
