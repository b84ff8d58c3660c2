"""Calls in Python's syntax, whose arguments `ast` reads; nothing is evaluated.

The values are those that JSON has too: strings, numbers, True, False, None (and JSON's true,
false, null), lists, tuples as lists, dicts with string keys. Depth is bounded, time linear.
"""

from __future__ import annotations

import ast
import math
import re
from contextlib import suppress
from typing import Any, NamedTuple

from rollout.chat.parsers.json_calls import MAX_DEPTH, FaultyCall, skip_space, whole_value

#: Commas of one call. No model writes as many.
MAX_VALUES = 50_000

_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_CALL = re.compile(rf"\s*({_NAME})\s*(?=\()", re.ASCII)
_PRINT = re.compile(rf"\s*print\(\s*(?={_NAME}\s*\()", re.ASCII)
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(?!=)", re.ASCII)
_STRING = re.compile(
    r"([rRuU]?)(?:"
    r'"""((?:[^"\\]++|\\.|"(?!""))*+)"""|'
    r"'''((?:[^'\\]++|\\.|'(?!''))*+)'''|"
    r'"((?:[^"\\\n]++|\\.)*+)"|'
    r"'((?:[^'\\\n]++|\\.)*+)')",
    re.DOTALL,
)
#: What may stand up to the next bracket or comma: no two words side by side.
_PART = re.compile(
    rf"(?:{_STRING.pattern}|[=:+-]|\s++|[\w.]++(?!\s+[\w.]))*+(?P<sign>[\[\](){{}},])?", re.DOTALL
)
_ESCAPE = re.compile(
    r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(\n|[\\'\"abfnrtv]))"
)
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
_CONSTANTS = {"true": True, "false": False, "null": None}
_ENDS = {"[": "]", "(": ")", "{": "}"}


def make_fault(reason: str, text: str, at: int) -> FaultyCall:
    """The fault that `reason` names, with what stands at `at`."""
    seen = text[at : at + 20]
    return FaultyCall(f"{reason}: {seen!r}" if seen else f"{reason}: the text ends", at)


class PythonCall(NamedTuple):
    """A call and where it stands in the text."""

    name: str
    arguments: dict[str, Any]
    start: int
    stop: int


def read_call(text: str, at: int) -> PythonCall:
    """The call that begins at `at`, such as ``f(x=1, y="a")``; a `FaultyCall` of anything else."""
    head = _CALL.match(text, at)
    if head is None:
        raise make_fault("expected a call of a function", text, skip_space(text, at))
    arguments, stop = read_arguments(text, head.end())
    return PythonCall(head[1], arguments, head.start(1), stop)


def read_arguments(text: str, at: int) -> tuple[dict[str, Any], int]:
    """What stands in the parentheses at `at`, and after them; of equal names the last one counts.

    Raises:
        FaultyCall: They hold anything but literals with names.
    """
    items, stop = _split(text, at)
    arguments = {}
    for start, end in items:
        keyword = _KEYWORD.match(text, start, end)
        if keyword is None:
            raise make_fault("expected name=value", text, skip_space(text, start))
        try:
            arguments[keyword[1]] = read_literal(text[keyword.end() : end])
        except ValueError as error:
            raise make_fault(str(error), text, keyword.end()) from None
    return arguments, stop


def read_call_list(text: str, at: int) -> tuple[list[PythonCall], int]:
    """The calls of the list at `at`, one at least, such as ``[f(x=1), g()]``, and after it.

    Raises:
        FaultyCall: It holds anything else.
    """
    items, stop = _split(text, at)
    calls = [read_call(text, start) for start, _ in items]
    for call, (_, end) in zip(calls, items, strict=True):
        if text[call.stop : end].strip():
            raise make_fault("expected , or ]", text, skip_space(text, call.stop))
    if not calls:
        raise make_fault("expected a call of a function", text, stop - 1)
    return calls, stop


def read_statement(text: str, at: int) -> tuple[list[PythonCall], int]:
    """The calls of one statement, and after it: a call, a list, or one inside ``print(…)``.

    Raises:
        FaultyCall: It is none of these.
    """
    at = skip_space(text, at)
    if text.startswith("[", at):
        return read_call_list(text, at)
    printed = _PRINT.match(text, at)
    call = read_call(text, at if printed is None else printed.end())
    stop = call.stop
    if printed is not None:
        stop = skip_space(text, stop)
        if not text.startswith(")", stop):
            raise make_fault("expected ) after print", text, stop)
        stop += 1
    after = skip_space(text, stop)
    return [call], after + 1 if text.startswith(";", after) else stop


def read_literal(text: str) -> Any:
    """The value that the whole of `text` writes; a ValueError where it is none."""
    text = text.strip()
    if text[:1] in ("[", "{"):
        with suppress(ValueError):  # most are JSON as well, which is read many times faster
            return whole_value(text)
    if text.count(",") >= MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES:,} values in a call")
    try:
        return _convert(ast.parse(_STRING.sub(_rewrite, text), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):  # the last of what is nested too deeply
        raise ValueError("expected a literal") from None


def unescape(body: str) -> str:
    """What stands between quotes in Python; escapes that it does not know stay as they are."""
    return _ESCAPE.sub(_character, body) if "\\" in body else body


def _split(text: str, at: int) -> tuple[list[tuple[int, int]], int]:
    """Where the items stand in the brackets that open at `at`, and after them."""
    items: list[tuple[int, int]] = []
    ends: list[str] = []
    start = at + 1
    while True:
        part = _PART.match(text, at)
        assert part is not None
        sign, at = part["sign"], part.end()
        if sign is None:
            raise make_fault(f"expected a value or {ends[-1]}", text, at)
        if sign in _ENDS:
            ends.append(_ENDS[sign])
            if len(ends) > MAX_DEPTH:
                raise make_fault("nested too deeply", text, at - 1)
        elif sign == ",":
            if len(ends) == 1:
                items.append((start, at - 1))
                start = at
        elif sign != ends.pop():
            raise make_fault("a bracket closes another one", text, at - 1)
        elif not ends:
            if text[start : at - 1].strip():
                items.append((start, at - 1))
            return items, at


def _rewrite(string: re.Match[str]) -> str:
    """A string in the one form that no version of Python warns of."""
    body = string[string.lastindex or 0] or ""
    return repr(body if string[1] in ("r", "R") else unescape(body))


def _character(escape: re.Match[str]) -> str:
    octal, *hexadecimal, sign = escape.groups()
    if sign is not None:
        return _ESCAPED.get(sign, sign)
    code = int(octal, 8) if octal else int(next(digits for digits in hexadecimal if digits), 16)
    return chr(code) if code <= 0x10FFFF else escape[0]


def _convert(node: ast.expr, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    match node:
        case ast.Constant(value=str() | int() | None as value):
            return value
        case ast.Constant(value=float() as value):
            if not math.isfinite(value):
                raise ValueError("expected a number within bounds")
            return value
        case ast.Name(id="true" | "false" | "null" as name):
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=ast.Constant() as operand):
            number = _convert(operand)
            if type(number) in (int, float):
                return -number if isinstance(sign, ast.USub) else number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_convert(item, depth + 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, [_convert(each, depth + 1) for each in values], strict=True))
            raise ValueError("expected keys that are strings")
    raise ValueError("expected a literal")
