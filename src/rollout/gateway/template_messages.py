"""Messages of clients in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rollout.errors import TemplateError
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout.agents.services import Services
    from rollout.gateway.calls import ClientCall, ClientMessage
    from rollout.gateway.message_keys import OrderedMessage
    from rollout.gateway.turn_index import Request, Turn

Messages = list[dict[str, Any]]

ORDERS = ("system", "developer")
#: What the model reads of a call beside the one that its client may have in a turn.
NOT_EXECUTED = "not executed: one call per turn (parallel calls are switched off); call it again"


def convert_observation(rest: Sequence[OrderedMessage], turn: Turn) -> Messages:
    """What follows a generated turn; results carry the names and ids that the model gave."""
    messages = [_convert(message, turn.calls, position) for message, position in rest]
    results = sum(1 for _ in takewhile(lambda each: each["role"] == "tool", messages))
    if results:
        messages[results:results] = [
            {"role": "tool", "content": NOT_EXECUTED} | _name_call(call)
            for call in turn.calls[turn.sent_calls :]
        ]
    return messages


async def prepare_conversation(services: Services, request: Request) -> Messages:
    """The messages of a conversation from its beginning, as the template takes them."""
    messages: Any = await services.media.prepare(convert_conversation(request.messages))
    if is_plain(messages):
        return list(messages)
    return choose_variant(messages, services.template, request.call.tools)


def convert_conversation(messages: Sequence[OrderedMessage]) -> Messages:
    """A conversation from its beginning, as its client has it."""
    calls: tuple[tuple[str, str], ...] = ()
    converted = []
    for message, position in messages:
        if message.role == "assistant":
            # A call whose arguments are no object stands in the text, and has no id there.
            calls = tuple(
                (each.name, each.id if _is_object(each) else "") for each in message.calls
            )
            converted.append(_convert_turn(message))
        else:
            converted.append(_convert(message, calls, position))
    return converted


def is_plain(messages: Messages) -> bool:
    """Whether every template knows its roles in their places."""
    head = _count_orders(messages)
    roles = {each["role"] for each in messages[head:]}
    return not roles & set(ORDERS) and all(each["role"] == "system" for each in messages[:head])


def choose_variant(
    messages: Messages, template: Any, tools: Sequence[Mapping[str, Any]]
) -> Messages:
    """The first variant that the template writes, with every system message in it."""
    refusal: TemplateError | None = None
    for variant in _list_variants(messages):
        try:
            text = template.prompt_text(variant, tools or None)
        except TemplateError as error:
            refusal = refusal or error
            continue
        orders = [each for each in variant if each["role"] in ORDERS]
        if all(each["content"].strip() in text for each in orders):
            return variant
    raise refusal or TemplateError("the chat template leaves a system message out")


def _list_variants(messages: Messages) -> Iterator[Messages]:
    """The conversation in the ways in which a template may take it, the most faithful first.

    Some know no developers, and some no system messages but at the beginning.
    """
    yield messages
    as_system = [_change_role(each, ("developer",), "system") for each in messages]
    yield as_system
    head = _count_orders(as_system)
    yield as_system[:head] + [_change_role(each, ("system",), "user") for each in as_system[head:]]


def _count_orders(messages: Messages) -> int:
    """How many system and developer messages it begins with."""
    return sum(1 for _ in takewhile(lambda each: each["role"] in ORDERS, messages))


def _change_role(message: dict[str, Any], roles: Sequence[str], role: str) -> dict[str, Any]:
    return {**message, "role": role} if message["role"] in roles else message


def _convert(
    message: ClientMessage, calls: Sequence[tuple[str, str]], position: int
) -> dict[str, Any]:
    converted: dict[str, Any] = {"role": message.role, "content": encodable(message.text)}
    if message.parts:
        converted["content"] = [
            {"type": "text", "text": encodable(part)} if isinstance(part, str) else part
            for part in message.parts
        ]
    if message.role == "tool" and position < len(calls):
        return converted | _name_call(calls[position])
    if message.name:
        converted["name"] = message.name
    if message.role == "tool" and message.call_id:
        converted["tool_call_id"] = message.call_id
    return converted


def _name_call(call: tuple[str, str]) -> dict[str, str]:
    name, call_id = call
    return {"name": name, "tool_call_id": call_id} if call_id else {"name": name}


def _convert_turn(message: ClientMessage) -> dict[str, Any]:
    calls = [call for call in message.calls if _is_object(call)]
    others = [call for call in message.calls if not _is_object(call)]
    texts = [message.text, *(f"{call.name}({_write_text(call.arguments)})" for call in others)]
    text = "\n".join(filter(None, texts)) if others else message.text
    converted: dict[str, Any] = {"role": "assistant", "content": encodable(text)}
    if message.reasoning:
        converted["reasoning_content"] = encodable(message.reasoning)
    if calls:
        converted["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments or {}},
            }
            for call in calls
        ]
    return converted


def _is_object(call: ClientCall) -> bool:
    return not call.arguments or isinstance(call.arguments, Mapping)


def _write_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
