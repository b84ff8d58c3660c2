"""OpenAI's chat completions: what a body asks for, and the choices and chunks that answer it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import attrs
import msgspec

from rollout.gateway.apis import reading
from rollout.gateway.apis.reading import FunctionTool, refuse
from rollout.gateway.apis.writing import (
    ApiRequest,
    ReplyContext,
    format_event,
    format_ids,
    format_openai_error,
    write_arguments,
)
from rollout.gateway.calls import Answer, ClientCall, ClientMessage, Completion

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rollout.gateway.calls import GatewayError

FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls", "stop_string": "stop"}


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: Annotated[str, reading.match_one("system", "developer", "user", "assistant", "tool")]
    content: str | list[reading.Part] | None = None
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
    n: reading.Samples | None = None
    logprobs: bool | None = None
    response_format: Any = None
    modalities: list[Annotated[str, reading.match_one("text")]] | None = None


_DECODER = msgspec.json.Decoder(_Body)


def read_request(body: bytes, headers: Mapping[str, str]) -> ChatRequest:
    """What a body asks for."""
    reading.check_values(body)
    parsed = reading.decode(_DECODER, body)
    if parsed.top_logprobs and not parsed.logprobs:
        refuse("top_logprobs", "expected logprobs = true beside it")
    forms = {"tool_choice": parsed.tool_choice, "response_format": parsed.response_format}
    call = parsed.make_call(
        "chat",
        body,
        headers,
        messages=tuple(_read_messages(parsed.messages)),
        tools=tuple(
            reading.make_schema(tool.function, f"tools[{index}].function")
            for index, tool in enumerate(parsed.tools or ())
            if tool.type == "function" and tool.function is not None
        ),
        allows_calls=reading.read_type(parsed.tool_choice) != "none",
        parallel_calls=parsed.parallel_tool_calls is not False,
        max_new_tokens=parsed.max_completion_tokens or parsed.max_tokens,
        top_log_probs=parsed.top_logprobs if parsed.logprobs else None,
        stop=parsed.stop,
        n=parsed.n or 1,
        wants_log_probs=bool(parsed.logprobs),
        forced_by=reading.list_forcing(**forms),
    )
    return ChatRequest(call=call, parsed=parsed)


def _read_messages(messages: Sequence[_Message]) -> Iterator[ClientMessage]:
    names: dict[str, str] = {}
    functions = (call.function for message in messages for call in message.tool_calls or ())
    arguments = (function.arguments for function in functions)
    reading.check_values(*(each.encode() for each in arguments if isinstance(each, str)))
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        calls = tuple(_read_calls(message.tool_calls or (), path))
        names.update((call.id, call.name) for call in calls if call.id)
        call_id = message.tool_call_id or ""
        reasoning = message.reasoning_content
        if reasoning is None and isinstance(message.reasoning, str):
            reasoning = message.reasoning
        yield reading.make_message(
            message.role,
            message.content,
            f"{path}.content",
            reasoning=reasoning,
            calls=calls,
            call_id=call_id,
            name=message.name or names.get(call_id),
        )


def _read_calls(calls: Sequence[_Call], path: str) -> Iterator[ClientCall]:
    for number, call in enumerate(calls):
        arguments = call.function.arguments
        if isinstance(arguments, str):
            field = f"{path}.tool_calls[{number}].function.arguments"
            arguments = reading.read_arguments(arguments, field)
        yield ClientCall(call.function.name, arguments, call.id or "")


@attrs.frozen(kw_only=True)
class ChatRequest(ApiRequest):
    """A body that was read."""

    parsed: _Body

    def format_body(self, completion: Completion, context: ReplyContext) -> Mapping[str, Any]:
        choices = []
        ids: dict[str, Any] = {}
        for index, answer in enumerate(completion.answers):
            ids = format_ids(completion, answer, self.call)
            choice = {
                "index": index,
                "message": _format_message(answer),
                "logprobs": self._format_log_probs(answer, context),
                "finish_reason": FINISH[answer.finish],
            }
            choices.append(choice | _pick(ids, "token_ids"))
        body = _format_head(completion, context, "chat.completion") | {"choices": choices}
        return body | {"usage": _format_usage(completion)} | _pick(ids, "prompt_token_ids")

    def format_events(self, completion: Completion, context: ReplyContext) -> Iterator[bytes]:
        """Chunks of each choice: its role, thoughts, text, each call, and its end."""
        head = _format_head(completion, context, "chat.completion.chunk")
        options = self.parsed.stream_options
        has_usage = options is not None and options.include_usage
        if has_usage:
            head["usage"] = None
        prompt = _pick(format_ids(completion, completion.answers[0], self.call), "prompt_token_ids")
        for index, answer in enumerate(completion.answers):
            end: dict[str, Any] = {"delta": {}, "finish_reason": FINISH[answer.finish]}
            end |= _pick(format_ids(completion, answer, self.call), "token_ids")
            log_probs = self._format_log_probs(answer, context)
            for chunk in (*({"delta": delta} for delta in _list_deltas(answer)), end):
                choice: dict[str, Any] = {"index": index, "finish_reason": None, "logprobs": None}
                choice |= chunk
                # They come with the text, or at the end where there is none.
                if choice["delta"].get("content") or chunk is end:
                    choice["logprobs"], log_probs = log_probs, None
                yield format_event(head | {"choices": [choice]} | prompt)
                prompt = {}
        if has_usage:
            yield format_event(head | {"choices": [], "usage": _format_usage(completion)})
        yield b"data: [DONE]\n\n"

    def format_failure(self, error: GatewayError, context: ReplyContext) -> Iterator[bytes]:
        yield format_event(format_openai_error(error))

    def _format_log_probs(self, answer: Answer, context: ReplyContext) -> Mapping[str, Any] | None:
        if not self.call.wants_log_probs:
            return None
        return {"content": context.format_log_probs(answer), "refusal": None}


def _pick(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: values[name]} if name in values else {}


def _format_head(completion: Completion, context: ReplyContext, kind: str) -> dict[str, Any]:
    return {
        "id": completion.id,
        "object": kind,
        "created": context.created,
        "model": context.model,
        "system_fingerprint": None,
    }


def _format_calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": write_arguments(call)},
        }
        for call in answer.valid_calls
    ]


def _format_message(answer: Answer) -> dict[str, Any]:
    calls, text = _format_calls(answer), answer.client_text
    content = text or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _list_deltas(answer: Answer) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if answer.reasoning is not None:
        yield {"reasoning_content": answer.reasoning}
    if answer.client_text:
        yield {"content": answer.client_text}
    for number, call in enumerate(_format_calls(answer)):
        yield {"tool_calls": [{"index": number} | call]}


def _format_usage(completion: Completion) -> Mapping[str, Any]:
    read, sampled = len(completion.prompt_ids), completion.sampled_tokens
    return {
        "prompt_tokens": read,
        "completion_tokens": sampled,
        "total_tokens": read + sampled,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
    }
