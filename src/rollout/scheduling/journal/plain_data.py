"""Values of users as a journal holds them: exactly, or not at all."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import numpy as np

from rollout.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

logger = logging.getLogger("rollout.journal")

EXPECTED = (
    "expected plain data: None, bool, int, float, str, bytes, list, tuple, dict, or an "
    "array of numbers"
)
_ARRAY, _SCALAR, _TUPLE = 1, 2, 3
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


def exact_text(value: Any) -> str:
    """A text of a type of its own, such as `numpy.str_`, as the text that it is; for encoders.

    Raises:
        TypeError: It is none.
    """
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"Encoding objects of type {type(value).__qualname__} is unsupported")


#: Of records, and of what is in them.
encoder = msgspec.msgpack.Encoder(enc_hook=exact_text)


class _Unplain(Exception):
    """What is no plain data, and where it stands, from the inside."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.path = ""

    def within(self, place: object) -> _Unplain:
        """It stands there in what holds it."""
        self.path = f"[{place!r}]{self.path}"
        return self


def plain(value: Any, where: str) -> Any:
    """`value` in terms of which msgpack gives an equal one back; see `restored`.

    Raises:
        JournalError: It holds what is no plain data; names where that stands.
    """
    try:
        return _plain(value)
    except _Unplain as error:
        raise JournalError(f"{where}{error.path} {error}") from None
    except RecursionError:
        raise JournalError(f"{where} {TOO_DEEP}; {EXPECTED}") from None


def plain_items(items: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    """The same for the items of any mapping, which comes back as a dict.

    Raises:
        JournalError: One holds what is no plain data; names where that stands.
    """
    return cast("dict[Any, Any]", plain(dict(items), where))


def _plain(value: Any, depth: int = 0) -> Any:
    kind = type(value)
    if value is None or kind in _SIMPLE:
        return value
    if kind is str:
        return value if value.isascii() else _encodable(value)
    if kind is int:
        if not _LEAST <= value <= _MOST:
            raise _Unplain(f"is an int of more than 64 bits; {EXPECTED}")
        return value
    if kind is dict:  # one of another type would not come back as such
        return _items(value, depth + 1)
    if kind is list:
        return _each(value, depth + 1)
    if kind is tuple:
        return msgspec.msgpack.Ext(_TUPLE, encoder.encode(_each(value, depth + 1)))
    return _array(value)


def _items(value: Mapping[Any, Any], depth: int) -> dict[Any, Any]:
    _check_depth(depth)
    made = {}
    for key, each in value.items():
        if type(key) is type(each) is str and key.isascii() and each.isascii():  # as a rule
            made[key] = each
            continue
        try:
            made[_key(key)] = _plain(each, depth)
        except _Unplain as error:
            raise error.within(key) from None
    return made


def _each(values: Any, depth: int) -> list[Any]:
    _check_depth(depth)
    made: list[Any] = []
    for each in values:
        try:
            made.append(_plain(each, depth))
        except _Unplain as error:
            raise error.within(len(made)) from None
    return made


def _check_depth(depth: int) -> None:
    """Raise what the interpreter raises a little later: where it stands would fill a page."""
    if depth > MAX_DEPTH:
        raise RecursionError


def _encodable(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _Unplain(f"is a str that UTF-8 cannot hold: {error}") from None
    return value


def _key(key: Any) -> Any:
    if type(key) not in (str, int, bool):
        raise _Unplain(f"has a key that is a {type(key).__qualname__}; expected a str")
    return _plain(key)


def _array(value: Any) -> Any:
    is_array = type(value) is np.ndarray  # a subclass has more than its numbers, such as a mask
    is_scalar = isinstance(value, np.generic) and type(value) is value.dtype.type
    if (is_array or is_scalar) and value.dtype.kind in _NUMBERS:
        array = np.ascontiguousarray(value)
        fields = [array.dtype.str, list(np.shape(value)), array.tobytes()]
        return msgspec.msgpack.Ext(_ARRAY if is_array else _SCALAR, encoder.encode(fields))
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise _Unplain(f"is a {kind}; {EXPECTED}")


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

    Attributes:
        is_text: They are written as text, with a warning; else they are refused.
    """

    def __init__(self, *, as_text: bool) -> None:
        self.is_text = as_text
        self._said: set[str] = set()

    def items(
        self, items: Any, where: str, *, are_numbers: bool = False
    ) -> tuple[dict[Any, Any], JournalError | None]:
        """The items of a mapping as they are written, and why others are not.

        Args:
            items: Mapping of keys to values.
            where: Names it.
            are_numbers: Whether values are numbers, and a float stands for one of them as text: who
                sums them up could do nothing with a text.
        """
        try:
            return _items(items, 1), None
        except _Unplain as error:
            fault = JournalError(f"{where}{error.path} {error}")
        except RecursionError:  # the loop below names it
            fault = None
        written: dict[Any, Any] = {}
        for key, value in items.items():
            try:
                written[_key(key)] = _plain(value, 1)
            except (_Unplain, RecursionError) as error:
                what = error if isinstance(error, _Unplain) else _Unplain(f"{TOO_DEEP}; {EXPECTED}")
                found = JournalError(f"{where}{what.within(key).path} {what}")
                fault = fault or found
                if self.is_text:
                    self._say(type(value).__qualname__, found)
                    written[_text(key, str)] = _text(value, float if are_numbers else repr)
        return written, None if self.is_text else fault

    def text_of(self, value: Any, where: str, error: JournalError) -> Any:
        """What is written of one that cannot be written itself; of a mapping, item by item.

        Args:
            error: Why.
        """
        if isinstance(value, Mapping):
            return self.items(value, where)[0]
        self._say(type(value).__qualname__, error)
        return _text(value, repr)

    def _say(self, kind: str, error: JournalError) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s; it is written as text, and so are others of this type", error)


def _text(value: Any, kind: Callable[[Any], T]) -> T | str:
    """A value as one that can be written, or at least what it is."""
    try:
        made = kind(value)
        if not isinstance(made, str):
            return made
        is_set = type(value) in (set, frozenset)
        shown = f"{{{', '.join(sorted(map(repr, value)))}}}" if is_set else made
        # The same in each process.
        return _ADDRESS.sub("", shown.encode("utf-8", "backslashreplace").decode())
    except Exception as failure:  # a foreign __repr__
        what = f"<{type(value).__qualname__} whose {kind.__name__} raises "
        return f"{what}{type(failure).__qualname__}>"
