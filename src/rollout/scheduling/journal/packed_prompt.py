"""A prompt as bytes, and back: its messages as they were given."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict

from rollout.chat.plain_data import encoder, from_plain
from rollout.errors import JournalError
from rollout.medium import Media
from rollout.scheduling.journal.frames import most_bytes
from rollout.scheduling.journal.plain_data import Unwritable, plain, plain_items
from rollout.types import Message, Prompt, ToolCall

if TYPE_CHECKING:
    from collections.abc import Collection

_encode = encoder.encode
_SINGLE, _TEXT = frozenset((type(None), str, int, float, bool, bytes)), frozenset((str,))
#: Beside the codes of `plain_data`: a `Message` of a prompt, and what is in it, as their fields.
STRUCTS: dict[int, type[Message | ToolCall | Media]] = {4: Message, 5: ToolCall, 6: Media}
_CODES: dict[type, int] = {kind: code for code, kind in STRUCTS.items()}
_SEQUENCES = frozenset(("tool_calls", "parts"))
_MAY_BE_EMPTY = _SEQUENCES | {"extra", "fields"}


def packed_prompt(
    prompt: Prompt, where: str, unwritable: Unwritable | None = None, texts: Collection[str] = ()
) -> bytes:
    """The fields of a prompt; those that `texts` names as `unwritable` says, if that is given.

    Raises:
        JournalError: One holds what is no plain data, or too much; names it.
    """
    try:
        if _says_little(prompt):
            packed = _encode(prompt)
            if len(packed) <= most_bytes():
                return packed
    except (TypeError, ValueError, OverflowError):
        pass  # what follows names the field
    fields = {name: getattr(prompt, name) for name in Prompt.__struct_fields__}
    fields["messages"] = [_given_fields(each) for each in prompt.messages]
    for name, value in fields.items():
        is_given = value is not None and (type(value) is not dict or len(value) > 0)
        if is_given:  # most are not
            to_plain = plain_items if isinstance(value, Mapping) else plain
            try:
                fields[name] = to_plain(value, f"{where}.{name}")
            except JournalError as error:
                if unwritable is None or name not in texts or not unwritable.is_text:
                    raise
                fields[name] = unwritable.text_of(value, f"{where}.{name}", error)
    for at, each in enumerate(prompt.messages):
        if type(each) is Message:
            fields["messages"][at] = _as_given(each, fields["messages"][at])
    packed = _encode(fields)
    if len(packed) > most_bytes():
        sizes = {name: len(_encode(value)) for name, value in fields.items()}
        name = max(sizes, key=lambda name: sizes[name])
        raise JournalError(
            f"{where}.{name} is of {sizes[name]:,} bytes; expected a prompt of at most "
            f"{most_bytes():,} bytes"
        )
    return packed


def _says_little(prompt: Prompt) -> bool:
    """Whether a prompt is plain without another look: messages of texts, and single values."""
    if type(prompt) is not Prompt or type(prompt.messages) is not list:
        return False
    if prompt.sampling or prompt.tools_kwargs or prompt.extra:
        return False
    values = prompt.uid, prompt.agent_name, prompt.tools, prompt.ground_truth, prompt.data_source
    if not _SINGLE.issuperset(map(type, values)):
        return False
    for each in prompt.messages:
        if type(each) is not dict or not _TEXT.issuperset(map(type, chain(each, each.values()))):
            return False
    return True


def _given_fields(message: Any) -> Any:
    """Of a message as it was given, those that it has; see `_as_given`."""
    if type(message) is not Message:
        return dict(message) if isinstance(message, Mapping) else message
    fields = asdict(message)
    for name in _SEQUENCES:
        if isinstance(fields[name], list | tuple):
            fields[name] = [
                _with_dicts(asdict(each)) if type(each) in _CODES else each for each in fields[name]
            ]
    for name in fields.keys() - {"role"}:
        if fields[name] is None or (name in _MAY_BE_EMPTY and _is_empty(fields[name])):
            del fields[name]
    return _with_dicts(fields)


def _with_dicts(fields: dict[str, Any]) -> dict[str, Any]:
    for name in fields.keys() & {"extra", "fields", "arguments"}:
        if isinstance(fields[name], Mapping):
            fields[name] = dict(fields[name])
    return fields


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping) and not len(value)


def _as_given(message: Message, fields: dict[str, Any]) -> msgspec.msgpack.Ext:
    """What reads as an equal message again, of its fields as plain data."""
    for name in fields.keys() & _SEQUENCES:
        given = getattr(message, name)
        if isinstance(given, list | tuple):
            fields[name] = [
                _ext(each, plain) if type(each) in _CODES else plain
                for each, plain in zip(given, fields[name], strict=True)
            ]
    return _ext(message, fields)


def _ext(given: Any, fields: dict[str, Any]) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_CODES[type(given)], _encode(fields))


def prompt_of(fields: bytes) -> Prompt:
    """The prompt that was packed; mappings among its messages are dicts."""
    return Prompt(**msgspec.msgpack.decode(fields, ext_hook=_restored_in_prompt))


def _restored_in_prompt(code: int, data: memoryview) -> Any:
    kind = STRUCTS.get(code)
    if kind is None:
        return from_plain(code, data)
    fields = msgspec.msgpack.decode(data, ext_hook=_restored_in_prompt)
    for name in fields.keys() & _SEQUENCES:
        if isinstance(fields[name], list):
            fields[name] = tuple(fields[name])
    return kind(**fields)
