"""Values of users as a journal holds them: exactly, or not at all."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import numpy as np

from rollout.errors import JournalError

logger = logging.getLogger("rollout.journal")

EXPECTED = (
    "expected plain data: None, bool, int, float, str, bytes, list, tuple, dict, or an "
    "array of numbers"
)
_ARRAY, _SCALAR, _TUPLE = 1, 2, 3
#: Kinds of NumPy's types that are numbers.
_NUMBERS = "biufc"
_LEAST, _MOST = -(2**63), 2**64 - 1

_encoder = msgspec.msgpack.Encoder()


def plain(value: Any, where: str) -> Any:
    """`value` in terms of which msgpack gives an equal one back; see `restored`.

    Raises:
        JournalError: It holds what is no plain data; names where that stands.
    """
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is str:
        return _encodable(value, where)
    if kind is int:
        if not _LEAST <= value <= _MOST:
            raise JournalError(f"{where} is an int of more than 64 bits; {EXPECTED}")
        return value
    if isinstance(value, dict):
        return {_key(key, where): plain(each, f"{where}[{key!r}]") for key, each in value.items()}
    if kind is list or kind is tuple:
        items = [plain(each, f"{where}[{at}]") for at, each in enumerate(value)]
        return items if kind is list else msgspec.msgpack.Ext(_TUPLE, _encoder.encode(items))
    return _array(value, where)


def _encodable(value: str, where: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise JournalError(f"{where} is a str that UTF-8 cannot hold: {error}") from None
    return value


def _key(key: Any, where: str) -> Any:
    if type(key) not in (str, int, bool):
        raise JournalError(f"{where} has a key that is a {type(key).__qualname__}; expected a str")
    return plain(key, f"{where}, its key {key!r:.80}")


def _array(value: Any, where: str) -> Any:
    is_array = isinstance(value, np.ndarray)
    if (is_array or isinstance(value, np.generic)) and value.dtype.kind in _NUMBERS:
        array = np.ascontiguousarray(value)
        fields = [array.dtype.str, list(np.shape(value)), array.tobytes()]
        return msgspec.msgpack.Ext(_ARRAY if is_array else _SCALAR, _encoder.encode(fields))
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise JournalError(f"{where} is a {kind}; {EXPECTED}")


def restored(code: int, data: memoryview) -> Any:
    """The `ext_hook` that undoes `plain`."""
    if code == _TUPLE:
        return tuple(msgspec.msgpack.decode(data, ext_hook=restored))
    if code not in (_ARRAY, _SCALAR):
        raise ValueError(f"unknown extension {code}")
    dtype, shape, content = msgspec.msgpack.decode(data)
    array = np.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
    return array if code == _ARRAY else array[()]


class Unwritable:
    """What becomes of values that are no plain data.

    Args:
        as_text: They are written as text, with a warning; else they are refused.
    """

    def __init__(self, *, as_text: bool) -> None:
        self._as_text = as_text
        self._said: set[str] = set()

    def items(self, items: Any, where: str) -> tuple[dict[Any, Any], JournalError | None]:
        """The items of a mapping as they are written, and why others are not.

        Args:
            items: Mapping of keys to values.
            where: Names it.
        """
        written: dict[Any, Any] = {}
        fault: JournalError | None = None
        for key, value in items.items():
            try:
                written[_key(key, where)] = plain(value, f"{where}[{key!r}]")
            except JournalError as error:
                if self._as_text:
                    written[str(key)] = self._text(value, error)
                else:
                    fault = fault or error
        return written, fault

    def _text(self, value: Any, error: JournalError) -> str:
        kind = type(value).__qualname__
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s; it is written as text, and so are others of this type", error)
        try:
            return repr(value).encode("utf-8", "backslashreplace").decode()
        except Exception as failure:  # a foreign __repr__
            return f"<{kind} whose repr raises {type(failure).__qualname__}>"
