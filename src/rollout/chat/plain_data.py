"""Values of users as records hold them, or refused by where they stand.

Journals hold arrays exactly, tuples as lists and NumPy's scalars as numbers; what crosses to a
child process may be simplified first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollout.utf8 import encodable, is_encodable

if TYPE_CHECKING:
    from collections.abc import Callable

EXPECTED = (
    "expected plain data: None, bool, int, float, str, bytes, list, tuple, dict, or an "
    "array of numbers"
)
_ARRAY = 1
#: How deep values may be nested: what is written can be read again, however little of the stack is
#: left then.
MAX_DEPTH = 100
TOO_DEEP = f"refers to itself, or is nested more than {MAX_DEPTH} deep"
#: Where an object lies in memory, as it shows itself.
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")
#: Kinds of NumPy's types that are numbers.
_NUMBERS = "biufc"
_SIMPLE = frozenset((bool, float, bytes))
_LEAST, _MOST = -(2**63), 2**64 - 1


class NotPlainError(Exception):
    """A value is no plain data; says which it is, and where it stands."""

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(what)
        self.what, self.path = what, path

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


#: Of records, and of what is in them; texts of a type of their own (`numpy.str_`) become texts.
encoder = msgspec.msgpack.Encoder(enc_hook=str.__str__)


def pack_array(value: Any) -> Any:
    """An array of numbers so that `from_plain` gives it back; a scalar of NumPy's as its number."""
    if type(value) is np.ndarray and value.dtype.kind in _NUMBERS:
        array = np.ascontiguousarray(value)
        content = [array.dtype.str, list(value.shape), array.tobytes()]
        return msgspec.msgpack.Ext(_ARRAY, encoder.encode(content))
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float):
        return value.item()
    return value


def to_plain(value: Any, where: str, simplify: Callable[[Any], Any] = pack_array) -> Any:
    """`value` in terms of which msgpack gives an equal one back; see `from_plain`.

    Args:
        where: What it is called in errors.
        simplify: Makes plain data of values that msgpack has no type for; those that it returns
            as they are, are refused.

    Raises:
        NotPlainError: It holds what is no plain data.
    """
    try:
        return _plain(value, 0, simplify)
    except NotPlainError as error:
        error.path = where + error.path
        raise
    except RecursionError:
        raise NotPlainError(f"{TOO_DEEP}; {EXPECTED}", where) from None


def from_plain(code: int, data: memoryview) -> Any:
    """The `ext_hook` that undoes `to_plain`."""
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    dtype, shape, content = msgspec.msgpack.decode(data)
    return np.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def simplify(value: Any) -> Any:
    """A value that msgpack has no type for, as the plain data that says the same; for `to_plain`.

    Arrays, tensors and sets become lists, fields of structs, dataclasses and attrs classes dicts,
    an `IntEnum` or `StrEnum` its value, halves of characters U+FFFD. Values that would be another
    value over there, such as a Decimal or a date, are returned as they are, and refused.
    """
    if isinstance(value, str):  # an enumeration's too
        return encodable(str.__str__(value))
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    record: Any = type(value)
    names = [*value.__struct_fields__] if isinstance(value, msgspec.Struct) else []
    for own in (getattr(record, "__attrs_attrs__", ()), is_dataclass(record) and fields(record)):
        names += [each.name for each in own or ()]
    if names:
        return {name: getattr(value, name, None) for name in names}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence | Set) else value


def show_value(value: Any, kind: Callable[[Any], Any] = repr) -> Any:
    """A value as one that can be written, or at least what it is: the same in each process."""
    try:
        made = kind(value)
        if not isinstance(made, str):
            return made
        is_set = type(value) in (set, frozenset)
        shown = f"{{{', '.join(sorted(map(repr, value)))}}}" if is_set else made
        return _ADDRESS.sub("", shown.encode("utf-8", "backslashreplace").decode())
    except Exception as failure:  # a foreign __repr__
        what = f"<{type(value).__qualname__} whose {kind.__name__} raises "
        return f"{what}{type(failure).__qualname__}>"


def _plain(value: Any, depth: int, simplify: Callable[[Any], Any]) -> Any:
    """`value`, which stands in `depth` others, as plain data."""
    kind = type(value)
    if value is None or kind in _SIMPLE or (kind is str and is_encodable(value)):
        return value
    if kind is int:
        if not _LEAST <= value <= _MOST:
            raise NotPlainError(f"is an int of more than 64 bits; {EXPECTED}")
        return value
    if kind in (dict, list, tuple):  # one of another type would not come back as such
        return _plain_items(value, depth + 1, simplify)
    if kind is datetime and value.tzinfo is not None:  # msgpack has those
        return value
    made = simplify(value)
    if made is not value:
        is_packed = type(made) is msgspec.msgpack.Ext
        return made if is_packed else _plain(made, depth + 1, simplify)
    if kind is str:
        raise NotPlainError(f"is a str that UTF-8 cannot hold: {value!r:.80}")
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    raise NotPlainError(f"is a {name}; {EXPECTED}")


def _plain_items(value: Any, depth: int, simplify: Callable[[Any], Any]) -> Any:
    """A dict or a list of plain data."""
    if depth > MAX_DEPTH:  # as the interpreter a little later: the path would fill a page
        raise RecursionError
    is_dict, items = type(value) is dict, list[Any]()
    for key, each in value.items() if is_dict else enumerate(value):
        try:
            item = _plain(each, depth, simplify)
            items.append((_plain_key(key, simplify), item) if is_dict else item)
        except NotPlainError as error:
            error.path = f"[{key!r}]{error.path}"
            raise
    return dict(items) if is_dict else items


def _plain_key(key: Any, simplify: Callable[[Any], Any]) -> Any:
    if type(key) is tuple:  # msgpack has arrays as keys
        return tuple(_plain_key(each, simplify) for each in key)
    if key is None or isinstance(key, str | int | float | bytes):
        return _plain(key, 0, simplify)
    raise NotPlainError(f"has a key that is a {type(key).__qualname__}; expected a str")
