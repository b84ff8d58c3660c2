"""What makes two messages the same: hashes of what they say, whatever way a client writes it.

Argument spacing, the order of keys, escapes, null or empty contents, and all ids are forms; text,
reasoning, and calls as names with JSON values are what is said.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rollout.gateway.calls import GatewayError, GivenMessage

#: Integers beyond this are no longer exact in JavaScript, which writes 1.0 as 1, too.
EXACT = 2**53
#: Of calls without arguments, as clients write them.
_NOTHING = (None, "")


class Key(NamedTuple):
    """What is compared of one message.

    Attributes:
        given: Of what the client says, in this place.
        said: Of an assistant's turn: of its text and calls. None of other messages.
        reasoning: Of an assistant's turn; empty where there is none.
        ids: Whatever names it, or the call that it answers.
    """

    given: bytes
    said: bytes | None
    reasoning: bytes
    ids: tuple[str, ...]


class Placed(NamedTuple):
    """A message and, of a tool's answer, the position of its call in the turn that it answers."""

    message: GivenMessage
    position: int = -1


def placed(messages: Iterable[GivenMessage]) -> list[Placed]:
    """The messages, each run of tools' answers in the order of the calls that they answer.

    Clients send answers in the order in which their tools ended. Answers whose calls cannot be told
    by their ids stay in the order given, and are counted.
    """
    found: list[Placed] = []
    calls: dict[str, int] = {}
    run: list[GivenMessage] = []
    for message in messages:
        if message.role == "tool":
            run.append(message)
            continue
        if run:
            found += _in_order(run, calls)
            run = []
        if message.role == "assistant":
            calls = {call.id: at for at, call in enumerate(message.calls) if call.id}
        found.append(Placed(message))
    return found + _in_order(run, calls)


def _in_order(run: list[GivenMessage], calls: Mapping[str, int]) -> list[Placed]:
    positions = [calls.get(message.call_id, -1) for message in run]
    if -1 in positions or len(set(positions)) < len(positions):
        return [Placed(message, at) for at, message in enumerate(run)]
    pairs = sorted(zip(positions, run, strict=True), key=lambda pair: pair[0])
    return [Placed(message, at) for at, message in pairs]


def keys_of(messages: Iterable[Placed]) -> list[Key]:
    """The key of each."""
    return [_key(message, position) for message, position in messages]


def _key(message: GivenMessage, position: int) -> Key:
    if message.role == "assistant":
        said = said_key(message.text, ((call.name, call.arguments) for call in message.calls))
        reasoning = reasoning_key(message.reasoning)
        ids = (*message.ids, *(call.id for call in message.calls)) if message.calls else message.ids
        return Key(_digest("assistant", said, reasoning), said, reasoning, ids)
    if message.role == "tool":
        given = _digest("tool", b"%d" % position, _bytes(message.text))
        return Key(given, None, b"", (message.call_id,))
    given = _digest(message.role, _bytes(message.name or ""), _bytes(message.text))
    return Key(given, None, b"", ())


def said_key(text: str, calls: Iterable[tuple[str, Any]]) -> bytes:
    """Of a turn: its text without white space around it, its calls as names with JSON values."""
    values = [[name, canonical({} if value in _NOTHING else value)] for name, value in calls]
    return _digest("said", _bytes(text.strip()), _json(values) if values else b"")


def reasoning_key(reasoning: str | None) -> bytes:
    """Of what the model thought, without white space around it; empty where there is none."""
    text = (reasoning or "").strip()
    return _digest("reasoning", _bytes(text)) if text else b""


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Of a set of tools, in whatever order."""
    return _digest("tools", *sorted(_json(canonical(tool)) for tool in tools))


def canonical(value: Any) -> Any:
    """A JSON value whose numbers are equal wherever a client may write them so."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is float:
        return int(value) if value.is_integer() and abs(value) <= EXACT else value
    if kind is int:
        return value if -EXACT <= value <= EXACT else _rounded(value)
    if isinstance(value, Mapping):
        return {name: canonical(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(each) for each in value]
    return value


def _rounded(value: int) -> int | float:
    try:
        return float(value)
    except OverflowError:
        return value


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
    except RecursionError:
        raise GatewayError(400, "invalid_request", "JSON is nested too deeply") from None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(kind: str, *parts: bytes) -> bytes:
    lengths = b",".join(b"%d" % len(part) for part in parts)
    return hashlib.blake2b(
        b"".join((kind.encode(), b":", lengths, b":", *parts)), digest_size=16
    ).digest()
