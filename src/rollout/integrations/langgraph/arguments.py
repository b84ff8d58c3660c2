"""Arguments of a chat model's call, checked as those of a request over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rollout.gateway.apis import reading
from rollout.gateway.calls import GatewayCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.gateway.calls import ClientMessage


class CallArguments(reading.SamplingFields, forbid_unknown_fields=True):
    """What a call may be given: fields of `sampling`, and those of OpenAI's chat completions.

    Attributes:
        max_tokens, max_completion_tokens: Other names of `max_new_tokens`.
        stream: Whether LangChain streams; the model tells all at the end.
        strict: Of tools; no engine can hold the model to it.
    """

    greedy: bool | None = None
    max_new_tokens: reading.Tokens | None = None
    max_completion_tokens: reading.Tokens | None = None
    max_tokens: reading.Tokens | None = None
    top_log_probs: reading.TopLogProbs | None = None
    n: reading.Samples | None = None
    stop: reading.Stops | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=reading.MAX_TOOLS)] | None = None
    tool_choice: str | bool | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    strict: bool | None = None


class _Function(msgspec.Struct):
    function: reading.FunctionTool


_TOOL = msgspec.json.Decoder(_Function)


def call_of(messages: tuple[ClientMessage, ...], given: Mapping[str, Any]) -> GatewayCall:
    """What is asked of the session.

    Raises:
        GatewayError: An argument is unknown, or has a value that cannot be; names it, the value and
            what was expected.
    """
    asked = _checked(given)
    if not messages:
        reading.refuse("messages", "expected one message or more")
    choice = None if asked.tool_choice is False else asked.tool_choice
    most = asked.max_new_tokens or asked.max_completion_tokens or asked.max_tokens
    return GatewayCall(
        api="chat",
        messages=messages,
        tools=_tools(asked.tools or ()),
        allows_calls=reading.read_type(choice) != "none",
        forced_by=reading.list_forcing(tool_choice=choice),
        parallel_calls=asked.parallel_tool_calls is not False,
        sampling=asked.list_sampling(
            greedy=asked.greedy, top_log_probs=asked.top_log_probs, max_new_tokens=most
        ),
        seed=asked.convert_seed(),
        n=asked.n or 1,
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
    )


def _checked(given: Mapping[str, Any]) -> CallArguments:
    unknown = [name for name in given if name not in CallArguments.__struct_fields__]
    if unknown:
        known = ", ".join(CallArguments.__struct_fields__)
        refused = f"{unknown[0]} = {given[unknown[0]]!r:.80}: unknown argument; known: {known}"
        raise reading.make_error(refused, unknown[0])
    try:
        return msgspec.convert(given, CallArguments)
    except msgspec.ValidationError as error:
        raise _refusal(given, error) from None


def _refusal(given: Mapping[str, Any], error: msgspec.ValidationError) -> Exception:
    """The error of an argument of another type, or out of its range."""
    problem, field = reading.split_problem(error)
    name = field.partition("[")[0].partition(".")[0]
    expected = problem.replace("Expected", "expected", 1)
    return reading.make_error(f"{field} = {given.get(name)!r:.80}: {expected}", name)


def _tools(given: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Functions; as over HTTP, the model is not told of tools that are none."""
    return tuple(
        _function(tool, f"tools[{index}]")
        for index, tool in enumerate(given)
        if tool.get("type", "function") == "function" and tool.get("function") is not None
    )


def _function(tool: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    try:
        body = msgspec.json.encode({"function": tool["function"]})
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reading.refuse(field, f"{tool!r:.80}: no JSON ({error}); expected a tool's JSON schema")
    return reading.make_schema(reading.decode(_TOOL, body, field).function, f"{field}.function")
