"""What makes two messages the same: hashes of their content, whatever form a client writes it in.

Argument spacing, the order of keys, escapes, null or empty contents, and all ids are form; text,
reasoning, and calls as names with JSON values are content.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollout.chat.result_order import MessageIds, result_order
from rollout.gateway.calls import ClientMessage, GatewayError

#: Integers from this on are no longer exact in JavaScript, which writes 1.0 as 1, too.
EXACT = 2**53
_encode = json.JSONEncoder(sort_keys=True, default=str).encode


class MessageKey(NamedTuple):
    """What is compared of one message.

    Attributes:
        content: Hash of all but an assistant's reasoning.
        reasoning: Hash of an assistant's reasoning; None where there is none.
        is_turn: Whether the assistant speaks.
        ids: Whatever names the message, or the call that it answers.
    """

    content: int
    reasoning: int | None
    is_turn: bool
    ids: tuple[str, ...]


class OrderedMessage(NamedTuple):
    """A message and, of a tool's result, the position of its call in the turn before it."""

    message: ClientMessage
    position: int


def order_results(messages: Sequence[ClientMessage]) -> list[OrderedMessage]:
    """The messages, each turn's results of tools in the order of the calls that they answer.

    Clients send results in the order in which their tools ended. Results that do not name their
    calls stay where they are, and are counted.
    """
    ordered: list[OrderedMessage] = []
    positions: dict[str, int] = {}
    count = 0
    for at in result_order([_find_ids(message) for message in messages]):
        message = messages[at]
        position = -1
        if message.role == "assistant":
            positions = {call.id: at for at, call in enumerate(message.calls) if call.id}
            count = 0
        elif message.role == "tool":
            position = positions.get(message.call_id, count)
            count += 1
        ordered.append(OrderedMessage(message, position))
    return ordered


def _find_ids(message: ClientMessage) -> MessageIds:
    calls = tuple(call.id for call in message.calls)
    return MessageIds(message.role, calls, message.call_id if message.role == "tool" else "")


def hash_message(message: ClientMessage, position: int) -> MessageKey:
    """The key of a message."""
    if message.role == "assistant":
        calls = [(call.name, call.arguments) for call in message.calls]
        ids = (*message.ids, *(call.id for call in message.calls))
        return MessageKey(
            hash_turn(message.text, calls), hash_reasoning(message.reasoning), True, ids
        )
    parts = tuple(map(_hash_part, message.parts)) if message.parts else message.text
    if message.role == "tool":
        return MessageKey(hash(("tool", position, parts)), None, False, (message.call_id,))
    return MessageKey(hash((message.role, message.name or "", parts)), None, False, ())


def _hash_part(part: str | Mapping[str, Any]) -> int:
    """Of an image, its content counts, however it is wrapped."""
    if isinstance(part, str):
        return hash(("text", part))
    return hash(("media", hash_json(part[str(part["type"])])))


def hash_turn(text: str, calls: Sequence[tuple[str, Any]]) -> int:
    """Of a turn: its text without white space around it, its calls as names with JSON values."""
    values = [[name, {} if value in (None, "") else value] for name, value in calls]
    return hash(("assistant", text.strip(), hash_json(values) if values else 0))


def hash_reasoning(reasoning: str | None) -> int | None:
    """Of what the model thought, without white space around it; None where there is none."""
    text = (reasoning or "").strip()
    return hash(text) if text else None


def hash_tools(tools: Sequence[Mapping[str, Any]]) -> int:
    """Of a set of tools, in whatever order."""
    return hash(tuple(sorted(map(hash_json, tools))))


def hash_json(value: Any) -> int:
    """Of a JSON value, however a client writes it.

    Raises:
        GatewayError: It is nested too deeply.
    """
    try:
        return hash(_encode(canonicalize(value)))
    except RecursionError:
        raise GatewayError(400, "invalid_request", "JSON is nested too deeply") from None


def canonicalize(value: Any) -> Any:
    """A JSON value whose numbers are equal wherever a client may write them so."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, dict):
        return {str(name): canonicalize(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonicalize(each) for each in value]
    if isinstance(value, int):
        return value if -EXACT < value < EXACT else _round(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < EXACT else value
    return canonicalize(dict(value)) if isinstance(value, Mapping) else value


def _round(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def mint_id(*parts: object, length: int) -> str:
    """An id of hexadecimal digits, the same for the same parts."""
    text = "\x1f".join(map(str, parts))
    return hashlib.blake2b(text.encode(), digest_size=length // 2).hexdigest()
