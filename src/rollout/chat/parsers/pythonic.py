"""Calls in Python's syntax, whose arguments `ast` reads, and the format of Llama 4, lists of them.

The values are those that JSON has too: strings, numbers, True, False, None (and JSON's true,
false, null), lists, tuples as lists, dicts, their keys as text. Depth is bounded, time linear.
"""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from typing import Any

from rollout.chat.parsers.json_calls import MAX_DEPTH, FaultyCall, read_json_text, skip_space
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser, TurnScan

#: Commas and opening brackets of one call. No model writes as many.
MAX_VALUES = 50_000

_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_CALL = re.compile(rf"\s*({_NAME})\s*(?=\()", re.ASCII)
_PRINT = re.compile(rf"\s*print\(\s*(?={_NAME}\s*\()", re.ASCII)
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(?!=)", re.ASCII)
#: A string; group 1 is its prefix, the last one its body.
STRING = (
    r"([rRuU]?)(?:"
    r'"""((?:[^"\\]++|\\.|"(?!""))*+)"""|'
    r"'''((?:[^'\\]++|\\.|'(?!''))*+)'''|"
    r'"(?!"")((?:[^"\\\n]++|\\.)*+)"|'
    r"'(?!'')((?:[^'\\\n]++|\\.)*+)')"
)
#: What `ast` reads otherwise than it is meant here: strings, JSON's constants.
_REWRITTEN = re.compile(rf"\b(?P<constant>true|false|null)\b|{STRING}", re.DOTALL)
#: What may stand up to the next bracket or comma: no two words side by side.
_PART = re.compile(
    rf"(?:{STRING}|[=:+-]|\s++|[\w.]++(?!\s+[\w.]))*+(?P<sign>[\[\](){{}},])?", re.DOTALL
)
_ESCAPE = re.compile(
    r"(?:\\(?:[0-3]?[0-7]{1,2}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}"
    r"|[\n\\'\"abfnrtv]))+"
)
#: Outside of strings, what no value has: operators, sums, calls, words. `ast` takes long to see it.
_FOREIGN = re.compile(
    r"[<>*/%&|^~@;!=]|\d\s*+[+-]\s*+[\d.]++\s*+[+-]|[\])}]\s*+[\w\[({]"
    r"|(?<![\w.])(?!None\b|True\b|False\b)[A-Za-z]\w"
)
_COMMENT = re.compile(r"#[^\n]*+")
_CONSTANTS = {"true": "True", "false": "False", "null": "None"}
_ENDS = {"[": "]", "(": ")", "{": "}"}
#: What a list of calls begins with: the first function's name, and whether the rest is no sentence:
#: its arguments have names, or it has none and the list continues as one.
CALL_LIST = (
    r"\[(?=\s*+(?P<name>[A-Za-z_][\w.]*+)\s*+\("
    r"(?P<named>\s*+(?:\)\s*+[],]|[A-Za-z_]\w*+\s*+=\s*+[\w+.\"'\[({-]))?)"
)
#: Dots stand for arguments where a list is spoken of.
_DOTS = re.compile(r"\[\s*[\w.]+\(\s*(?:\.\.\.|…)")


def make_fault(
    reason: str, text: str, at: int, stop: int | None = None, *, is_cut: bool = False
) -> FaultyCall:
    """The fault that `reason` names, with what stands at `at`.

    Where `stop` is given, what is faulty ends there: brackets in it are not looked at again.
    """
    seen = text[at : at + 20]
    reason = f"{reason}: {seen!r}" if seen else f"{reason}: the text ends"
    return FaultyCall(reason, at if stop is None else stop, is_cut=is_cut)


#: Where a call begins and ends, its function and arguments: what `TurnScan.add_call` takes.
PythonCall = tuple[int, int, str, dict[str, Any]]


def read_call(text: str, at: int) -> PythonCall:
    """The call that begins at `at`, such as ``f(x=1, y="a")``; a `FaultyCall` of anything else."""
    head = _CALL.match(text, at)
    if head is None:
        raise make_fault("expected a call of a function", text, skip_space(text, at))
    arguments, stop = read_keywords(text, head.end())
    return head.start(1), stop, head[1], arguments


def read_keywords(text: str, at: int) -> tuple[dict[str, Any], int]:
    """What stands in the parentheses at `at`, and after them; of equal names the last one counts.

    Raises:
        FaultyCall: They hold anything but literals with names.
    """
    items, stop = _split(text, at)
    arguments = {}
    for start, end in items:
        keyword = _KEYWORD.match(text, start, end)
        if keyword is None:
            raise make_fault("expected name=value", text, skip_space(text, start), stop)
        try:
            arguments[keyword[1]] = read_literal(text[keyword.end() : end])
        except ValueError as error:
            raise make_fault(str(error), text, keyword.end(), stop) from None
    return arguments, stop


def read_call_list(text: str, at: int) -> tuple[list[PythonCall], int]:
    """The calls of the list at `at`, such as ``[f(x=1), g()]``, and after it.

    Raises:
        FaultyCall: It holds anything else.
    """
    items, stop = _split(text, at)
    try:
        calls = [read_call(text, start) for start, _ in items]
    except FaultyCall as fault:
        fault.at = stop
        raise
    for (_, stop_of_call, *_), (_, end) in zip(calls, items, strict=True):
        if text[stop_of_call:end].strip():
            raise make_fault("expected , or ]", text, skip_space(text, stop_of_call), stop)
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
    stop = call[1]
    if printed is not None:
        stop = skip_space(text, stop) + 1
        if text[stop - 1 : stop] != ")":
            raise make_fault("expected ) after print", text, stop - 1)
    return [call], stop


def read_literal(text: str) -> Any:
    """The value that the whole of `text` writes, as JSON has it; a ValueError where it is none."""
    text = text.strip()
    if text[:1] in ("[", "{"):
        with suppress(ValueError):  # most are JSON as well, which is read many times faster
            return read_json_text(text)
    bare, strings = _REWRITTEN.subn("", text)
    if text.count(",") >= MAX_VALUES or strings > 2 * MAX_VALUES:  # a key and a value each
        raise ValueError(f"more than {MAX_VALUES:,} values in a call")
    if _FOREIGN.search(_COMMENT.sub("", bare)):
        raise ValueError("expected a literal")
    try:
        value = ast.literal_eval(_REWRITTEN.sub(_rewrite, text))
        return read_json_text(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise ValueError("expected a literal") from None  # or what is nested too deeply


def read_bare(text: str) -> Any:
    """The constant, number, list or object that `text` writes without quotes around it.

    Raises:
        ValueError: It writes something else.
    """
    if text in ("null", "None"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.startswith(("{", "[", "(")):
        return read_literal(text)
    if not text.startswith(tuple("-0123456789")):  # a text, which JSON has in quotes only
        raise ValueError("neither a constant, a number, a list nor an object")
    return read_json_text(text)


def unescape(body: str) -> str:
    """What stands between quotes in Python; escapes that it does not know stay as they are."""
    return _ESCAPE.sub(lambda escape: escape[0].encode().decode("unicode_escape"), body)


def _split(text: str, at: int) -> tuple[list[tuple[int, int]], int]:
    """Where the items stand in the brackets that open at `at`, and after them."""
    items: list[tuple[int, int]] = []
    ends: list[str] = []
    start, values = at + 1, 0
    while True:
        part = _PART.match(text, at)
        assert part is not None
        sign, at = part["sign"], part.end()
        if sign is None:
            raise make_fault(f"expected a value or {ends[-1]}", text, at)
        values += sign in "[({,"
        if values > MAX_VALUES:
            reason = f"more than {MAX_VALUES:,} values in a call"
            raise make_fault(reason, text, skip_space(text, start), at)
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


def find_code_end(text: str, at: int, end: str) -> int:
    """After the next `end` outside of strings; the end of the text, also where one stays open."""
    parts = re.compile(rf"{STRING}|#(?:(?!{end})[^\n])*+|(?P<end>{end})|['\"]", re.DOTALL)
    for part in parts.finditer(text, at):
        if part["end"] is not None:
            return part.end()
        if part[0] in ("'", '"'):
            break
    return len(text)


def _rewrite(found: re.Match[str]) -> str:
    """A constant as Python has it; a string in the one form that no version of it warns of."""
    if found["constant"] is not None:
        return _CONSTANTS[found["constant"]]
    body = found[found.lastindex or 0] or ""
    return repr(body if found[2] in ("r", "R") else unescape(body))


@register_tool_parser("pythonic")
class PythonicParser(TaggedParser):
    """Arguments are literals by name; nothing is evaluated.

    A list that is malformed is one invalid call where it begins a line, follows
    ``<|python_start|>`` or names a tool that is offered; elsewhere it is content, since prose
    and mathematics write ``[f(x), g(x)]`` as well.
    """

    stop_tokens = ("<|eot|>", "<|eom|>", "<|eot_id|>", "<|eom_id|>")
    opening = rf"(?P<mark><\|python_start\|>\s*+)?{CALL_LIST}|<\|python_end\|>"
    nested = re.compile(
        r"(?P<opens><\|python_start\|>\s*\[\s*[A-Za-z_][\w.]*\s*\()|(?P<closes><\|python_end\|>)"
    )

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        return opening["name"] is not None or scan.follows_call(opening.start())

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        if opening["name"] is None:
            return scan.end_call(opening.end())
        return add_call_list(scan, opening, is_marked=opening["mark"] is not None)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        end = find_code_end(scan.text, opening.end(), r"<\|python_end\|>")
        return max(end, super().find_end(scan, opening, fault))


def add_call_list(scan: TurnScan, opening: re.Match[str], *, is_marked: bool = False) -> int:
    """Add the calls of the list that `opening` begins; return the position after it."""
    name, named = opening.group("name", "named")
    is_meant = is_marked or scan.is_at_line_start or name in scan.tool_names
    if named is None and not is_meant:
        return scan.add_content(*opening.span())
    start = opening.end() - 1
    try:
        calls, stop = read_call_list(scan.text, start)
    except FaultyCall as fault:
        if is_meant and _DOTS.match(scan.text, start) is None:
            fault.is_cut = not is_marked
            raise
        return scan.add_content(opening.start(), max(fault.at, opening.end()))
    for call in calls:
        scan.add_call(*call)
    return scan.end_call(stop)
