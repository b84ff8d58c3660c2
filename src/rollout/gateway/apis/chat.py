"""OpenAI's chat completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout.gateway.apis import reading
from rollout.gateway.apis.reading import FunctionTool, refuse
from rollout.gateway.apis.writing import (
    COMMENT,
    Teller,
    arguments_text,
    event,
    openai_error,
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

ROUTE = "chat"
ROLES = ("system", "developer", "user", "assistant", "tool")
FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls", "stop_string": "stop"}


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
    tools: list[_Tool] | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: reading.Tokens | None = None
    max_completion_tokens: reading.Tokens | None = None
    stop_token_ids: list[reading.TokenId] | None = None
    n: reading.Samples | None = None
    logprobs: bool | None = None
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
        digest=reading.digest_of(ROUTE, body),
    )
    return ChatRequest(reading.checked(call), asked)


def error_body(error: GatewayError) -> Mapping[str, Any]:
    """An error, as this API tells it."""
    return openai_error(error)


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


class ChatRequest:
    """A body that was read; see `ApiRequest`."""

    keep_alive = COMMENT

    def __init__(self, call: GatewayCall, asked: _Body) -> None:
        self.call = call
        self.model = asked.model
        self.is_streamed = bool(asked.stream)
        options = asked.stream_options
        self._tells_usage = options is not None and bool(options.include_usage)

    def body(self, completion: Completion, teller: Teller) -> Mapping[str, Any]:
        """The whole answer."""
        choices = []
        for index, answer in enumerate(completion.answers):
            choice = {
                "index": index,
                "message": _message(answer),
                "logprobs": self._log_probs(answer, teller),
                "finish_reason": _finish(answer),
            }
            choices.append(choice | self._token_ids(answer))
        whole = _head(completion, teller, "chat.completion")
        return whole | {"choices": choices, "usage": _usage(completion)} | self._prompt(completion)

    def events(self, completion: Completion, teller: Teller) -> Iterator[bytes]:
        """Of each choice what the whole would say, as differences."""
        head = _head(completion, teller, "chat.completion.chunk")
        rest = {"usage": None} if self._tells_usage else {}
        prompt = self._prompt(completion)
        for index, answer in enumerate(completion.answers):
            for choice in self._deltas(answer, teller):
                yield event(head | {"choices": [{"index": index} | choice]} | rest | prompt)
                prompt = {}
        if self._tells_usage:
            yield event(head | {"choices": [], "usage": _usage(completion)})
        yield b"data: [DONE]\n\n"

    def failure(self, error: GatewayError, teller: Teller) -> bytes:
        """The end of a stream that has begun already."""
        return event(error_body(error))

    def _deltas(self, answer: Answer, teller: Teller) -> Iterator[dict[str, Any]]:
        said = _message(answer)
        log_probs = {"logprobs": self._log_probs(answer, teller)}
        none = {"logprobs": None, "finish_reason": None}
        yield {"delta": {"role": "assistant", "content": ""}} | none
        if answer.reasoning is not None:
            yield {"delta": {"reasoning_content": answer.reasoning}} | none
        if said["content"]:
            yield {"delta": {"content": said["content"]}} | none | log_probs
            log_probs = {}
        for index, call in enumerate(said.get("tool_calls", ())):
            yield {"delta": {"tool_calls": [{"index": index} | call]}} | none
        end: dict[str, Any] = {
            "delta": {},
            "logprobs": None,
            "finish_reason": _finish(answer),
        } | log_probs
        yield end | self._token_ids(answer)

    def _log_probs(self, answer: Answer, teller: Teller) -> Mapping[str, Any] | None:
        if not self.call.wants_log_probs:
            return None
        return {"content": teller.log_probs(answer), "refusal": None}

    def _token_ids(self, answer: Answer) -> dict[str, Any]:
        return {"token_ids": answer.ids.tolist()} if self.call.wants_ids else {}

    def _prompt(self, completion: Completion) -> dict[str, Any]:
        return {"prompt_token_ids": completion.prompt_ids.tolist()} if self.call.wants_ids else {}


def _head(completion: Completion, teller: Teller, kind: str) -> dict[str, Any]:
    return {
        "id": completion.id,
        "object": kind,
        "created": teller.created,
        "model": teller.model,
        "system_fingerprint": None,
    }


def _message(answer: Answer) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments_text(call)},
        }
        for call in valid_calls(answer)
    ]
    text = told_text(answer)
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    message["refusal"] = None
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _finish(answer: Answer) -> str:
    if answer.finish == "calls" and not valid_calls(answer):
        return "stop"
    return FINISH[answer.finish]


def _usage(completion: Completion) -> Mapping[str, Any]:
    read = len(completion.prompt_ids)
    sampled = sum(len(answer.ids) for answer in completion.answers)
    return {
        "prompt_tokens": read,
        "completion_tokens": sampled,
        "total_tokens": read + sampled,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
    }
