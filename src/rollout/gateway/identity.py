"""What makes two messages the same: hashes of what they say, whatever way a client writes it.

Argument spacing, the order of keys, escapes, null or empty contents, and all ids are forms; text,
reasoning, and calls as names with JSON values are what is said.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from rollout.chat.result_order import MessageIds, result_order
from rollout.gateway.calls import GatewayError, GivenCall, GivenMessage

#: Integers from this on are no longer exact in JavaScript, which writes 1.0 as 1, too.
EXACT = 2**53
#: Of calls without arguments, as clients write them.
_NOTHING = (None, "")
_write = msgspec.json.Encoder(order="sorted").encode
#: What it raises of half a character, a huge integer, another mapping than a dict, deep nesting.
_UNWRITABLE = (UnicodeEncodeError, TypeError, OverflowError, RecursionError)
#: Bytes of calls whose keys are remembered.
_SHORT = 256


#: What stands for a text, and for a turn of several: Python's own hash, of 64 bits under a key of
#: the process. A long conversation has hundreds of them in every request.
Digest = int | tuple[Hashable, ...]


class Key(NamedTuple):
    """What is compared of one message.

    Attributes:
        given: Of what the client says, in this place.
        said: Of an assistant's turn: of its text and calls. None of other messages.
        reasoning: Of an assistant's turn; None where there is none.
        ids: Whatever names it, or the call that it answers.
    """

    given: Digest
    said: Digest | None
    reasoning: int | None
    ids: tuple[str, ...]


class Placed(NamedTuple):
    """A message and, of a tool's answer, the position of its call in the turn that it answers."""

    message: GivenMessage
    position: int


def placed(messages: Sequence[GivenMessage]) -> list[Placed]:
    """The messages, each turn's answers of tools in the order of the calls that they answer.

    Clients send answers in the order in which their tools ended. Answers that do not name their
    calls stay in the order given, and are counted.

    Raises:
        TemplateError: As `result_order`.
    """
    order = result_order([_ids(message) for message in messages])
    if order is not None:
        messages = [messages[at] for at in order]
    positions = [-1] * len(messages)
    calls: Sequence[GivenCall] = ()
    answers: list[int] = []
    for at, message in enumerate(messages):
        if message.role == "tool":
            answers.append(at)
        elif message.role == "assistant":
            _count(positions, messages, answers, calls)
            calls, answers = message.calls, []
    _count(positions, messages, answers, calls)
    return list(map(Placed, messages, positions))


def _ids(message: GivenMessage) -> MessageIds:
    if message.role == "assistant":
        return MessageIds("assistant", tuple([call.id for call in message.calls]))
    return MessageIds("tool", (), message.call_id) if message.role == "tool" else _NO_IDS


_NO_IDS = MessageIds("user")


def _count(
    positions: list[int],
    messages: Sequence[GivenMessage],
    answers: Sequence[int],
    calls: Sequence[GivenCall],
) -> None:
    """Find the positions of the calls that the answers of one turn answer."""
    own = {call.id: at for at, call in enumerate(calls) if call.id}
    named = {own.get(messages[at].call_id) for at in answers}
    others = (position for position in itertools.count() if position not in named)
    for at in answers:
        position = own.get(messages[at].call_id)
        positions[at] = next(others) if position is None else position


def keys_of(messages: Iterable[Placed]) -> list[Key]:
    """The key of each.

    Raises:
        GatewayError: Arguments are nested too deeply.
    """
    return [_key(message, position) for message, position in messages]


def _key(message: GivenMessage, position: int) -> Key:
    role, text = message.role, message.text
    if role == "assistant":
        calls = message.calls
        said = said_key(text, [(call.name, call.arguments) for call in calls])
        reasoning = reasoning_key(message.reasoning)
        ids = (*message.ids, *[call.id for call in calls]) if calls else message.ids
        return Key((said, reasoning), said, reasoning, ids)
    own = _shown(message.parts) if message.parts else hash(text)
    if role == "tool":
        return Key((role, position, own), None, None, (message.call_id,))
    return Key((role, message.name or "", own), None, None, ())


def _shown(parts: Iterable[str | Mapping[str, Any]]) -> int:
    """Of texts and images in their order: of an image its content, however it is wrapped."""
    return hash(
        tuple((True, each) if isinstance(each, str) else (False, _content(each)) for each in parts)
    )


def _content(part: Mapping[str, Any]) -> str | bytes:
    held = part[str(part["type"])]
    return held if isinstance(held, str) else _json(canonical(held))


def said_key(text: str, calls: Sequence[tuple[str, Any]]) -> Digest:
    """Of a turn: its text without white space around it, its calls as names with JSON values."""
    text = text.strip()
    if not calls:
        return hash(text)
    values = [[name, {} if value in _NOTHING else value] for name, value in calls]
    return ("calls", hash(text), _calls_key(values))


def _calls_key(values: list[Any]) -> int:
    try:
        written = _write(values)
    except _UNWRITABLE:
        return _key_of_values(values)
    return _key_of_written(written) if len(written) <= _SHORT else _key_of_values(values)


@lru_cache(1 << 13)
def _key_of_written(written: bytes) -> int:
    """Of calls as JSON; those of a long conversation come again with each of its requests."""
    return _key_of_values(json.loads(written))


def _key_of_values(values: list[Any]) -> int:
    return hash(_json(canonical(values)))


def reasoning_key(reasoning: str | None) -> int | None:
    """Of what the model thought, without white space around it; None where there is none."""
    text = (reasoning or "").strip()
    return hash(text) if text else None


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Of a set of tools, in whatever order."""
    written = sorted(_json(canonical(tool)) for tool in tools)
    return _digest(_json([each.hex() for each in written]))


def _digest(written: bytes) -> bytes:
    return hashlib.blake2b(written, digest_size=16).digest()


class ToolSets:
    """Keys of sets of tools; clients send the same bytes with each call."""

    def __init__(self) -> None:
        self._keys: dict[bytes, bytes] = {}

    def key(self, tools: Sequence[Mapping[str, Any]]) -> bytes:
        """As `tools_key`."""
        written = _digest(_json(tools))
        key = self._keys.get(written)
        if key is None:
            if len(self._keys) >= _MOST_TOOL_SETS:
                self._keys.clear()
            key = self._keys[written] = tools_key(tools)
        return key


#: Ways of writing tools of which the keys are remembered.
_MOST_TOOL_SETS = 16


def canonical(value: Any) -> Any:
    """A JSON value whose numbers are equal wherever a client may write them so."""
    try:
        return _canonical(value)
    except RecursionError:
        raise _too_deep() from None


def _canonical(value: Any) -> Any:
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is int:
        return value if -EXACT < value < EXACT else _rounded(value)
    if kind is dict or isinstance(value, Mapping):
        return {
            name: each if type(each) is str else _canonical(each) for name, each in value.items()
        }
    if kind is float:
        return int(value) if value.is_integer() and abs(value) < EXACT else value
    if isinstance(value, list | tuple):
        return [_canonical(each) for each in value]
    return value


def _rounded(value: int) -> int | float:
    try:
        return float(value)
    except OverflowError:
        return value


def _json(value: Any) -> bytes:
    try:
        return _write(value)
    except _UNWRITABLE:  # json writes all but what is nested too deeply
        pass
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> GatewayError:
    return GatewayError(400, "invalid_request", "JSON is nested too deeply")
