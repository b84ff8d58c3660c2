"""Arguments of a chat model's call, checked as those of a request over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rollout.gateway.apis import reading
from rollout.gateway.calls import GatewayCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.gateway.calls import ClientMessage


class CallArguments(msgspec.Struct, forbid_unknown_fields=True):
    """What a call may be given: fields of `sampling`, and those of OpenAI's chat completions.

    Attributes:
        max_tokens, max_completion_tokens: Other names of `max_new_tokens`.
        stream: Whether LangChain streams; the model tells all at the end.
        strict: Of tools; no engine can hold the model to it.
    """

    temperature: reading.Temperature | None = None
    top_p: reading.TopP | None = None
    top_k: reading.TopK | None = None
    min_p: reading.Share | None = None
    presence_penalty: reading.Penalty | None = None
    frequency_penalty: reading.Penalty | None = None
    repetition_penalty: reading.Repetition | None = None
    greedy: bool | None = None
    max_new_tokens: reading.Tokens | None = None
    max_completion_tokens: reading.Tokens | None = None
    max_tokens: reading.Tokens | None = None
    stop_token_ids: reading.StopIds | None = None
    top_log_probs: reading.TopLogProbs | None = None
    seed: int | None = None
    n: reading.Samples | None = None
    stop: str | list[str] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=reading.MAX_TOOLS)] | None = None
    tool_choice: str | bool | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    strict: bool | None = None


class _Function(msgspec.Struct):
    function: reading.FunctionTool


_FREE = (None, False, "auto", "none")
_TOOL = msgspec.json.Decoder(_Function)
_SAMPLING = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "greedy", "top_log_probs"),
)


def call_of(messages: tuple[ClientMessage, ...], given: Mapping[str, Any]) -> GatewayCall:
    """What is asked of the session.

    Raises:
        GatewayError: An argument is unknown, or has a value that cannot be; names it, the value and
            what was expected.
    """
    asked = _checked(given)
    call = GatewayCall(
        api="chat",
        messages=messages,
        tools=_tools(asked.tools or ()),
        tool_choice="none" if _is_none(asked.tool_choice) else "auto",
        forced_by=() if _is_free(asked.tool_choice) else ("tool_choice",),
        parallel_calls=asked.parallel_tool_calls is not False,
        sampling=_sampling(asked),
        seed=reading.convert_seed(asked.seed),
        n=asked.n or 1,
        stop=reading.check_stops(asked.stop, "stop"),
    )
    return reading.check_call(call)


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


def _sampling(asked: CallArguments) -> dict[str, Any]:
    """The fields of `SamplingConfig` that are set."""
    values = {name: getattr(asked, name) for name in _SAMPLING}
    values["top_k"] = reading.convert_top_k(asked.top_k)
    values["max_new_tokens"] = (
        asked.max_new_tokens or asked.max_completion_tokens or asked.max_tokens
    )
    if asked.stop_token_ids is not None:
        values["stop_token_ids"] = tuple(asked.stop_token_ids)
    return {name: value for name, value in values.items() if value is not None}


def _is_none(choice: Any) -> bool:
    """Whether a choice among tools keeps the model from calling any."""
    return choice == "none" or (isinstance(choice, dict) and choice.get("type") == "none")


def _is_free(choice: Any) -> bool:
    """Whether it leaves the model free to call one or none; LangChain's others are names, too."""
    return reading.is_free(choice) if isinstance(choice, dict) else choice in _FREE


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
