"""How messages to processes of `rewards.processes` and back are written, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec

from rollout.utf8 import encodable

#: Those that pass unseen; whether an int is too long shows when it is written.
_KNOWN: frozenset[type] = frozenset((type(None), bool, int, float, str, bytes))
#: What msgspec writes as a text, or as the value behind it, which is another value over there.
_REWRITTEN = (Decimal, UUID, date, time, timedelta, Enum)
_TEXTS = (str, bytes, bytearray, memoryview)


class NotPlainError(Exception):
    """Something cannot cross; says what and where it is."""


def encoded(message: msgspec.Struct) -> bytes:
    """A message as msgpack; arrays and tensors are lists then, halves of characters U+FFFD.

    Raises:
        NotPlainError: Something in it is no plain data.
    """
    try:
        if fault := _fault(message, _KNOWN):
            raise NotPlainError(_refusal(fault))
        return msgspec.msgpack.encode(message, enc_hook=_listed)
    except UnicodeEncodeError:
        kept = (bytes, datetime)
        plain = msgspec.to_builtins(message, builtin_types=kept, enc_hook=_listed)
        return msgspec.msgpack.encode(_encodable(plain))
    except NotPlainError:
        raise
    except RecursionError:
        raise NotPlainError(_refusal("what refers to itself, or is nested too deep,")) from None
    except Exception as error:  # whatever a foreign object raises
        raise NotPlainError(_refusal(_fault(message, frozenset()) or str(error))) from None


def _refusal(fault: str) -> str:
    return (
        f"{fault.lstrip('.')} cannot be handed over with rewards.processes; expected plain data "
        "(None, booleans, numbers, strings, bytes, lists, mappings, arrays)"
    )


def _listed(value: Any) -> Any:
    """Arrays and tensors as nested lists, their scalars as numbers, other mappings as dicts."""
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        return tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a value of type {type(value).__qualname__}")


def _fault(value: Any, known: frozenset[type]) -> str:
    """The way to the first thing that cannot cross as it is, and why; empty where all can."""
    kind = type(value)
    if kind in known or (kind is list and known.issuperset(map(type, value))):
        return ""
    if isinstance(value, _REWRITTEN) and not isinstance(value, int | str):
        is_moment = isinstance(value, datetime) and value.tzinfo is not None  # msgpack has those
        return "" if is_moment else f": a value of type {kind.__qualname__}"
    try:
        parts = _parts(value)
        if parts is None:
            msgspec.msgpack.encode(value, enc_hook=_listed)
    except UnicodeEncodeError:
        return ""
    except RecursionError:
        raise
    except Exception as error:
        return f": {error}"
    faults = ((name, _fault(part, known)) for name, part in parts or ())
    return next((f"{name}{fault}" for name, fault in faults if fault), "")


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """What a value holds, each with the way to it; None where it is one thing."""
    if isinstance(value, _TEXTS):
        return None
    if names := _fields(type(value)):
        return [(f".{name}", getattr(value, name, None)) for name in names]
    if hasattr(value, "tolist"):
        return [("", value.tolist())]
    if isinstance(value, Mapping):
        keys = [(f"[{key!r}]", key) for key in value if type(key) is not str]
        return keys + [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, Sequence | Set):
        return [(f"[{at}]", item) for at, item in enumerate(value)]
    return None


def _fields(kind: type) -> list[str]:
    """Names of those of structs, dataclasses and attrs classes."""
    of_attrs = [each.name for each in getattr(kind, "__attrs_attrs__", ())]
    return [
        *getattr(kind, "__struct_fields__", ()),
        *(each.name for each in (fields(kind) if is_dataclass(kind) else ())),
        *of_attrs,
    ]


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_encodable, value))
    if isinstance(value, tuple):  # a key may be one
        return tuple(map(_encodable, value))
    return value
