"""OpenAI's responses: what a body asks for; `response_events` tells the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rollout.gateway.apis import reading
from rollout.gateway.apis.reading import FunctionTool, refuse
from rollout.gateway.apis.response_events import ResponsesRequest, error_body
from rollout.gateway.apis.response_items import Item, messages_of
from rollout.gateway.apis.response_output import Tools
from rollout.gateway.calls import GatewayCall, GivenMessage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ROUTE", "error_body", "read"]

ROUTE = "responses"
LOG_PROBS = "message.output_text.logprobs"


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
    conversation: Any = None
    background: bool | None = None
    tools: Annotated[list[_Tool], msgspec.Meta(max_length=reading.MAX_TOOLS)] | None = None
    text: Any = None
    include: list[str] | None = None
    max_output_tokens: reading.Tokens | None = None
    metadata: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(_Body)


def read(body: bytes, headers: Mapping[str, str]) -> ResponsesRequest:
    """What a body asks for.

    Raises:
        GatewayError: It cannot be served.
    """
    asked = reading.decoded(_DECODER, body)
    _refuse_impossible(asked)
    if not isinstance(asked.input, str):
        reading.refuse_many(asked.input, "input", "content", "summary", "output")
    tools = _tools(asked.tools or ())
    messages = _messages(asked, tools)
    call = GatewayCall(
        api="responses",
        messages=messages,
        tools=tuple(tools.schemas),
        tool_choice=_tool_choice(asked, tools.schemas),
        parallel_calls=asked.parallel_tool_calls is not False,
        sampling=asked.sampling(
            max_new_tokens=asked.max_output_tokens, top_log_probs=asked.top_logprobs
        ),
        seed=reading.seed_of(asked.seed),
        stop=reading.stops_of(asked.stop, "stop"),
        previous_id=asked.previous_response_id,
        text_tools=tools.of_text,
        agent_id=headers.get("x-openai-subagent") or headers.get("x-claude-code-agent-id"),
        is_side=not tools.schemas and reading.asks_for_title(messages),
        wants_log_probs=LOG_PROBS in (asked.include or ()) or asked.top_logprobs is not None,
        wants_ids=bool(asked.return_token_ids),
        forced_by=asked.forced_by(**{"text.format": _format(asked.text)}),
        digest=reading.digest_of(ROUTE, body),
        is_retry=reading.is_retry(headers),
    )
    return ResponsesRequest(
        reading.checked(call),
        model=asked.model,
        is_streamed=bool(asked.stream),
        tools=tools,
        echoed=_echoed(asked),
        is_codex=headers.get("originator", "").startswith("codex"),
    )


def _refuse_impossible(asked: _Body) -> None:
    asked.refuse_impossible()
    if asked.background:
        refuse("background", "not served; expected false")
    if asked.conversation is not None:
        refuse("conversation", "not served; expected previous_response_id")


def _messages(asked: _Body, tools: Tools) -> tuple[GivenMessage, ...]:
    said = asked.input
    given: tuple[GivenMessage, ...] = ()
    if not isinstance(said, str):
        given = messages_of(said, tools.flat_name)
    elif said:
        given = (GivenMessage(role="user", text=said),)
    if not given or not asked.instructions:
        return given
    return (GivenMessage(role="system", text=asked.instructions, is_instructions=True), *given)


def _tools(given: Sequence[_Tool], space: str = "", within: str = "tools") -> Tools:
    """Functions, tools of free text and namespaces of both; others are run by servers."""
    tools = Tools()
    for index, tool in enumerate(given):
        place = f"{within}[{index}]"
        if tool.type == "function":
            function = FunctionTool(tool.name, tool.description, tool.parameters)
            tools.add(reading.function_schema(function, place), tool.name, space)
        elif tool.type == "custom":
            tools.add(
                reading.text_tool(tool.name, tool.description), tool.name, space, is_text=True
            )
        elif tool.type == "namespace" and not space:
            tools.update(_tools(tool.tools or (), tool.name, f"{place}.tools"))
    return tools


def _tool_choice(asked: _Body, tools: Sequence[Mapping[str, Any]]) -> str:
    choice = asked.tool_choice
    name = None
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        name = choice.get("name")
    return asked.choice(tools, name, "tool_choice.name")


def _format(text: Any) -> Any:
    return text.get("format") if isinstance(text, dict) else None


def _echoed(asked: _Body) -> dict[str, Any]:
    """What the answer repeats of the question."""
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "temperature": asked.temperature,
        "tool_choice": asked.tool_choice if isinstance(asked.tool_choice, str) else "auto",
        "tools": [],
        "top_p": asked.top_p,
        "truncation": "disabled",
    }
