"""JSON to tool calls: shared by the formats that write calls or their arguments as JSON.

Nothing is evaluated. Of equal keys in an object the last one counts; NaN, Infinity and numbers
that overflow are not JSON and make a call invalid.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

#: Nesting past this is no argument of a sane call; it also bounds Python's own stack.
MAX_DEPTH = 100
#: Read first; most calls are shorter. What turns out longer is read again with four times as much.
_WINDOW = 256
#: A fault this close to the end of a window may be the window's: ``\ud83d\ude00`` is cut there.
_LONGEST_ATOM = 16
#: What may stand before JSON, also where a string quotes it.
GAP = r"(?:\s|\\[nrt])*+"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def finite(literal: str) -> float:
    """The number that `literal` writes; ValueError where it overflows."""
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"{literal[:20]} is too large a number")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=finite)


class WrittenCall(NamedTuple):
    """A name and arguments, and the id that the model gave, if any."""

    name: str
    arguments: dict[str, Any]
    id: object


def value_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that starts at `at`, and where it ends.

    Reads little more than the value, so that a text full of faulty ones costs no more than itself.

    Raises:
        ValueError: There is no JSON value; says why, and where from `at`.
    """
    window = _WINDOW
    while True:
        piece = text[at : at + window]
        is_all = at + window >= len(text)
        try:
            value, length = _DECODER.raw_decode(piece)
        except json.JSONDecodeError as error:
            may_be_cut = error.msg.startswith("Unterminated string") or (
                error.pos + _LONGEST_ATOM > len(piece)
            )
            if is_all or not may_be_cut:
                raise ValueError(f"malformed JSON: {error}") from None
        except RecursionError:
            raise ValueError("malformed JSON: nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"malformed JSON: {error}") from None
        else:
            if is_all or length < len(piece):
                if isinstance(value, dict | list) and _is_deeper(value, MAX_DEPTH):
                    raise ValueError("malformed JSON: nested too deeply")
                return value, at + length
        window *= 4


def is_cut(reason: str) -> bool:
    """Whether `value_at` has failed since a string reaches to the end of the text."""
    return reason.startswith("malformed JSON: Unterminated string")


def _is_deeper(value: object, depth: int) -> bool:
    """Whether a value is nested deeper, so that code deeper in the stack could not walk it."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    nested = [item for item in items if type(item) in (dict, list)]
    return depth < 1 or any(_is_deeper(item, depth - 1) for item in nested)


def whole_value(text: str) -> Any:
    """The one JSON value that `text` is, white space aside.

    Raises:
        ValueError: It is none, or more than one.
    """
    body = text.strip(" \t\r\n")
    value, end = value_at(body, 0)
    if end < len(body):
        raise ValueError("malformed JSON: more text follows the value")
    return value


def call_of(value: object, *keys: str) -> WrittenCall:
    """The call that ``{"name": …, "arguments": {…}}`` describes.

    Arguments that are a string of JSON are parsed, once. A call with neither arguments nor other
    keys has none.

    Args:
        value: What the JSON says.
        keys: Names for the arguments, the first present counts; ``"arguments"`` where none given.

    Raises:
        ValueError: The value describes no call; says why.
    """
    if not isinstance(value, dict):
        raise ValueError(f"a call must be an object with name and arguments, not {_kind(value)}")
    name = value.get("name")
    if name is None:
        raise ValueError('the call has no "name"')
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f'"name" must be a non-empty string, not {name!r}')
    return WrittenCall(name.strip(), _arguments(value, keys or ("arguments",)), value.get("id"))


def arguments_of(value: object, key: str = "arguments") -> dict[str, Any]:
    """`value` as arguments by name; a string of JSON is parsed, once.

    Raises:
        ValueError: It is no object; says what it is.
    """
    if isinstance(value, str):
        try:
            value = whole_value(value)
        except ValueError as error:
            raise ValueError(f'"{key}" is a string of {error}') from None
    if not isinstance(value, dict):
        raise ValueError(f'"{key}" must be an object, not {_kind(value)}')
    return value


def _arguments(call: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    for key in keys:
        if key in call:
            return arguments_of(call[key], key)
    others = sorted(call.keys() - {"name", "id", "type"})
    if not others:
        return {}
    raise ValueError(f'the call has no "{keys[0]}", but {", ".join(map(json.dumps, others))}')


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
