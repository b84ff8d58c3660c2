"""OpenAI's chat completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rollout.gateway.apis import reading
from rollout.gateway.apis.chat_events import ChatRequest, error_body
from rollout.gateway.apis.reading import FunctionTool, refuse
from rollout.gateway.calls import GatewayCall, GivenCall, GivenMessage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["ROUTE", "error_body", "read"]

ROUTE = "chat"
ROLES = ("system", "developer", "user", "assistant", "tool")


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    video_url: Any = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None


class _Tool(msgspec.Struct):
    type: str = "function"
    function: FunctionTool | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(reading.OpenAIBody):
    messages: list[_Message] = msgspec.field(default_factory=list)
    tools: Annotated[list[_Tool], msgspec.Meta(max_length=reading.MAX_TOOLS)] | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: reading.Tokens | None = None
    max_completion_tokens: reading.Tokens | None = None
    stop_token_ids: reading.StopIds | None = None
    n: reading.Samples | None = None
    logprobs: bool | None = None
    response_format: Any = None
    modalities: list[str] | None = None
    functions: list[Any] | None = None


_DECODER = msgspec.json.Decoder(_Body)


def read(body: bytes, headers: Mapping[str, str]) -> ChatRequest:
    """What a body asks for.

    Raises:
        GatewayError: It cannot be served.
    """
    asked = reading.decoded(_DECODER, body)
    _refuse_impossible(asked)
    reading.refuse_many(asked.messages, "messages", "content", "tool_calls")
    tools = tuple(
        reading.function_schema(tool.function, f"tools[{index}].function")
        for index, tool in enumerate(asked.tools or ())
        if tool.type == "function" and tool.function is not None
    )
    messages = _messages(asked.messages)
    call = GatewayCall(
        api="chat",
        messages=messages,
        tools=tools,
        tool_choice=_tool_choice(asked, tools),
        parallel_calls=asked.parallel_tool_calls is not False,
        sampling=_sampling(asked),
        seed=reading.seed_of(asked.seed),
        n=asked.n or 1,
        stop=reading.stops_of(asked.stop, "stop"),
        agent_id=headers.get("x-claude-code-agent-id"),
        is_side=not tools and reading.asks_for_title(messages),
        wants_log_probs=bool(asked.logprobs),
        wants_ids=bool(asked.return_token_ids),
        forced_by=asked.forced_by(response_format=asked.response_format),
        digest=reading.digest_of(ROUTE, body),
        is_retry=reading.is_retry(headers),
    )
    options = asked.stream_options
    return ChatRequest(
        reading.checked(call),
        model=asked.model,
        is_streamed=bool(asked.stream),
        tells_usage=options is not None and bool(options.include_usage),
    )


def _refuse_impossible(asked: _Body) -> None:
    asked.refuse_impossible()
    if asked.functions:
        refuse("functions", "not served; expected tools")
    if asked.modalities and asked.modalities != ["text"]:
        refuse("modalities", f"{asked.modalities}; expected ['text']")
    if asked.top_logprobs and not asked.logprobs:
        refuse("top_logprobs", "expected logprobs = true beside it")


def _sampling(asked: _Body) -> dict[str, Any]:
    return asked.sampling(
        max_new_tokens=asked.max_completion_tokens or asked.max_tokens,
        stop_token_ids=tuple(asked.stop_token_ids) if asked.stop_token_ids else None,
        top_log_probs=asked.top_logprobs if asked.logprobs else None,
    )


def _tool_choice(asked: _Body, tools: Sequence[Mapping[str, Any]]) -> str:
    choice = asked.tool_choice
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return asked.choice(tools, name, "tool_choice.function.name")


def _messages(given: Sequence[_Message]) -> tuple[GivenMessage, ...]:
    names: dict[str, str] = {}
    read = []
    for index, message in enumerate(given):
        place = f"messages[{index}]"
        if message.role not in ROLES:
            refuse(f"{place}.role", f"{message.role!r}; expected one of {', '.join(ROLES)}")
        calls = tuple(_calls(message.tool_calls or (), place))
        names.update((call.id, call.name) for call in calls if call.id)
        call_id = message.tool_call_id or ""
        reasoning = message.reasoning_content
        if reasoning is None and isinstance(message.reasoning, str):
            reasoning = message.reasoning
        said = _said(message.content, f"{place}.content")
        if said.parts and message.role not in ("user", "tool"):
            refuse(f"{place}.content", "images may stand in messages of users and tools only")
        read.append(
            GivenMessage(
                role=message.role,
                text=said.text,
                parts=said.parts,
                reasoning=reasoning,
                calls=calls,
                call_id=call_id,
                name=message.name or names.get(call_id),
            )
        )
    return tuple(read)


def _calls(calls: Sequence[_Call], place: str) -> Iterator[GivenCall]:
    for number, call in enumerate(calls):
        arguments = call.function.arguments
        if isinstance(arguments, str):
            field = f"{place}.tool_calls[{number}].function.arguments"
            arguments = reading.arguments_of(arguments, field) if arguments else {}
        yield GivenCall(call.function.name, arguments, call.id or "")


def _said(content: str | list[_Part] | None, field: str) -> reading.Shown:
    if content is None or isinstance(content, str):
        return reading.Shown(content or "")
    parts: list[str | Mapping[str, Any]] = []
    for index, part in enumerate(content):
        if part.type in ("text", "refusal"):
            parts.append(part.text or part.refusal or "")
        else:
            value = part.image_url if part.type == "image_url" else part.video_url
            parts.append(reading.image_part(part.type, value, f"{field}[{index}]"))
    return reading.shown(parts)
