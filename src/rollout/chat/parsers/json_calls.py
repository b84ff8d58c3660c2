"""JSON to tool calls: shared by the formats that write calls or their arguments as JSON.

Nothing is evaluated. Of equal keys in an object the last one counts; NaN, Infinity and numbers
that overflow are not JSON and make a call invalid.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

#: Nesting past this is no argument of a sane call; it also bounds Python's own stack.
MAX_DEPTH = 100
#: What may stand before JSON, also where a string quotes it.
GAP = r"(?:\s|\\[nrt])*+"
_SPACE = re.compile(r"\s*+")


class FaultyCall(ValueError):
    """A call is not what its format wants.

    Attributes:
        at: Where, or past what is faulty in all.
        is_open: Whether a value may be open there, so that what follows may be quoted in it.
        is_cut: Whether its JSON, or a string in it, reaches to the end of the text.
    """

    def __init__(
        self, reason: str, at: int = 0, *, is_open: bool = True, is_cut: bool = False
    ) -> None:
        super().__init__(reason)
        self.at = at
        self.is_open = is_open
        self.is_cut = is_cut


def skip_space(text: str, at: int) -> int:
    """The first position from `at` that is not white space."""
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def _read_float(literal: str) -> float:
    if math.isfinite(number := float(literal)):
        return number
    raise ValueError(f"{literal[:20]} is not a finite number")


_DECODER = json.JSONDecoder(parse_constant=_read_float, parse_float=_read_float)


def read_json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that starts at `at`, and where it ends; a `FaultyCall` where there is none."""
    try:
        value, stop = _DECODER.raw_decode(text, at)
        _check_depth([value], MAX_DEPTH)
    except RecursionError:
        raise FaultyCall("malformed JSON: nested too deeply", at) from None
    except json.JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated string") or error.pos == len(text)
        relative = json.JSONDecodeError(error.msg, text[at : error.pos], error.pos - at)
        raise FaultyCall(f"malformed JSON: {relative}", at, is_cut=is_cut) from None
    except ValueError as error:
        raise FaultyCall(f"malformed JSON: {error}", at) from None
    return value, stop


def _check_depth(value: dict[str, Any] | list[Any], depth: int) -> None:
    """Raise a RecursionError where code deeper in the stack could not walk a value."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            if depth < 1:
                raise RecursionError
            _check_depth(item, depth - 1)


def read_json_text(text: str) -> Any:
    """The one JSON value that `text` is, white space aside; else a `FaultyCall`."""
    body = text.strip(" \t\r\n")
    value, end = read_json(body, 0)
    if end < len(body):
        raise FaultyCall("malformed JSON: more text follows the value")
    return value


def read_call_object(value: object, *keys: str) -> tuple[str, dict[str, Any], object]:
    """The name, arguments and id of the call that ``{"name": …, "arguments": {…}}`` describes.

    Arguments that are a string of JSON are parsed, once. A call with neither arguments nor other
    keys has none.

    Args:
        value: What the JSON says.
        keys: Names for the arguments, the first present counts; ``"arguments"`` by default.

    Raises:
        FaultyCall: The value describes no call; says why.
    """
    if not isinstance(value, dict):
        raise FaultyCall(f"a call must be an object with name and arguments, not {_kind(value)}")
    name = value.get("name")
    if name is None:
        raise FaultyCall('the call has no "name"')
    if not isinstance(name, str) or not name.strip():
        raise FaultyCall(f'"name" must be a non-empty string, not {name!r}')
    keys = keys or ("arguments",)
    key = next((key for key in keys if key in value), None)
    others = sorted(value.keys() - {"name", "id", "type"})
    if key is None and others:
        raise FaultyCall(f'the call has no "{keys[0]}", but {", ".join(map(json.dumps, others))}')
    arguments = {} if key is None else read_arguments(value[key], key)
    return name.strip(), arguments, value.get("id")


def read_arguments(value: object, key: str = "arguments") -> dict[str, Any]:
    """`value` as arguments by name; a string of JSON is parsed, once.

    Raises:
        FaultyCall: It is no object; says what it is.
    """
    if isinstance(value, str):
        try:
            value = read_json_text(value)
        except FaultyCall as error:
            raise FaultyCall(f'"{key}" is a string of {error}') from None
    if not isinstance(value, dict):
        raise FaultyCall(f'"{key}" must be an object, not {_kind(value)}')
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
