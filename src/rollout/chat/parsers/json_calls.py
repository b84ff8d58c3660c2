"""A JSON value to a tool call: shared by the formats that write calls as JSON.

Nothing is evaluated. Of equal keys in an object the last one counts; NaN and Infinity are not
JSON and make a call invalid.
"""

from __future__ import annotations

import json
import re
from typing import Any

from rollout.types import ToolCall


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)

_SPACE = re.compile(r"[ \t\n\r]*")


class UnterminatedError(ValueError):
    """The text ends inside a string of the JSON."""


def skip_space(text: str, at: int) -> int:
    """The first position from `at` that is not white space of JSON."""
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def first_value(text: str) -> tuple[Any, int]:
    """The JSON value that `text` starts with, and where it ends.

    Raises:
        UnterminatedError: `text` ends inside a string.
        ValueError: There is no JSON value; says why and where.
    """
    try:
        return _DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        kind = UnterminatedError if error.msg.startswith("Unterminated string") else ValueError
        raise kind(f"malformed JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("malformed JSON: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"malformed JSON: {error}") from error


def call_from_value(value: object, *, call_id: str, raw: str) -> ToolCall:
    """The call that ``{"name": …, "arguments": {…}}`` describes.

    Arguments that are a string of JSON are parsed, once. A call with neither ``arguments`` nor
    other keys has none.

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
    return ToolCall(name=name.strip(), arguments=_arguments(value), id=call_id, raw=raw)


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    others = sorted(call.keys() - {"name", "id", "type"})
    if not others:
        return {}
    if "arguments" not in call:
        raise ValueError(f'the call has no "arguments", but {", ".join(map(json.dumps, others))}')
    arguments = call["arguments"]
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f'"arguments" must be an object, not {_kind(arguments)}')
    return arguments


def _parsed(arguments: str) -> object:
    try:
        start = skip_space(arguments, 0)
        value, length = first_value(arguments[start:])
    except ValueError as error:
        raise ValueError(f'"arguments" is a string of {error}') from error
    if skip_space(arguments, start + length) < len(arguments):
        raise ValueError('"arguments" is a string of more than one JSON value')
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
