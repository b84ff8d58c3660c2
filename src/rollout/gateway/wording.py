"""Messages of clients in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollout.errors import TemplateError
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout.chat import ChatTemplate
    from rollout.gateway.calls import GivenCall, GivenMessage
    from rollout.gateway.identity import Placed
    from rollout.gateway.tree import Turn

Messages = list[dict[str, Any]]

#: What tells a model that may call one tool in a turn of a call beside it.
NOT_TOLD = "not executed: one call per turn (parallel calls are switched off); call it again"


def observation(rest: Sequence[Placed], turn: Turn) -> Messages:
    """What follows a generated turn; answers carry the names and ids that the model gave."""
    told = [_told(message, turn.calls, position) for message, position in rest]
    results = sum(1 for _ in _results(rest))
    if results:
        told[results:results] = [
            {"role": "tool", "content": NOT_TOLD} | _called(call)
            for call in turn.calls[turn.told :]
        ]
    return told


def _results(rest: Sequence[Placed]) -> Iterator[Placed]:
    for each in rest:
        if each.message.role != "tool":
            return
        yield each


def conversation(messages: Sequence[Placed]) -> Messages:
    """A conversation from its beginning, as its client tells it."""
    calls: tuple[tuple[str, str], ...] = ()
    told = []
    for message, position in messages:
        if message.role == "assistant":
            # A call that is told as text has no id there.
            calls = tuple(
                (call.name, call.id if _is_object(call) else "") for call in message.calls
            )
            told.append(_said(message))
        else:
            told.append(_told(message, calls, position))
    return told


def variants(messages: Messages) -> Iterator[Messages]:
    """A conversation in the ways in which a template may take it, the most faithful first.

    Some know no developers, and some no system messages but at the beginning.
    """
    yield messages
    as_system = [_in_role(each, ("developer",), "system") for each in messages]
    if as_system != messages:
        yield as_system
    head = _head(as_system)
    if any(each["role"] == "system" for each in as_system[head:]):
        yield as_system[:head] + [_in_role(each, ("system",), "user") for each in as_system[head:]]


def is_plain(messages: Messages) -> bool:
    """Whether every template knows its roles in their places."""
    head = _head(messages)
    roles = {each["role"] for each in messages[head:]}
    return not roles & {"system", "developer"} and all(
        each["role"] == "system" for each in messages[:head]
    )


def accepted(
    messages: Messages, template: ChatTemplate, tools: Sequence[Mapping[str, Any]]
) -> Messages:
    """The first variant that the template writes, with every system message in it.

    Raises:
        TemplateError: It takes none.
    """
    refusal: TemplateError | None = None
    for variant in variants(messages):
        try:
            text = template.prompt_text(variant, tools or None)
        except TemplateError as error:
            refusal = refusal or error
            continue
        if all(each["content"].strip() in text for each in _orders(variant)):
            return variant
    raise refusal or TemplateError("the chat template leaves a system message out")


def _orders(messages: Messages) -> Messages:
    return [each for each in messages if each["role"] in ("system", "developer")]


def _head(messages: Messages) -> int:
    """How many system and developer messages it begins with."""
    places = (at for at, each in enumerate(messages) if each["role"] not in ("system", "developer"))
    return next(places, len(messages))


def _in_role(message: dict[str, Any], roles: Sequence[str], role: str) -> dict[str, Any]:
    return {**message, "role": role} if message["role"] in roles else message


def _told(message: GivenMessage, calls: Sequence[tuple[str, str]], position: int) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.role != "tool":
        return told | ({"name": message.name} if message.name else {})
    if position < len(calls):
        return told | _called(calls[position])
    name = {"name": message.name} if message.name else {}
    return told | name | ({"tool_call_id": message.call_id} if message.call_id else {})


def _content(message: GivenMessage) -> Any:
    if not message.parts:
        return encodable(message.text)
    return [
        {"type": "text", "text": encodable(part)} if isinstance(part, str) else part
        for part in message.parts
    ]


def _called(call: tuple[str, str]) -> dict[str, str]:
    name, call_id = call
    return {"name": name, "tool_call_id": call_id} if call_id else {"name": name}


def _said(message: GivenMessage) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": encodable(message.text)}
    if message.reasoning:
        said["reasoning_content"] = encodable(message.reasoning)
    calls = [call for call in message.calls if _is_object(call)]
    if calls:
        said["tool_calls"] = [_call(call) for call in calls]
    others = [call for call in message.calls if not _is_object(call)]
    words = [said["content"], *(f"{call.name}({_text(call.arguments)})" for call in others)]
    return said | {"content": encodable("\n".join(filter(None, words)))} if others else said


def _call(call: GivenCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments or {}}
    return {"id": call.id, "type": "function", "function": function}


def _is_object(call: GivenCall) -> bool:
    return not call.arguments or isinstance(call.arguments, Mapping)


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
