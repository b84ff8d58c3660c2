"""Llama 3: calls as JSON objects at the start of a turn or after ``<|python_tag|>``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollout.chat.parsers.json_calls import GAP, FaultyCall, arguments_of, value_at
from rollout.chat.parsers.python_calls import read_arguments
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser, find_last_calls

if TYPE_CHECKING:
    from rollout.chat.parsers.scan import TurnScan

#: How an object in JSON begins.
OBJECT = r"\{\s*[\"}]"
TAG, END_FUNCTION = "<|python_tag|>", "</function>"

#: Code follows the tag at once.
_CODE = re.compile(r"\w")
_ARGUMENT = re.compile(r'"?\s*[{\[]')
_NESTED = re.compile(
    rf"(?P<opens><function=[^<>\n]*>{GAP}\{{)|(?P<closes>{re.escape(END_FUNCTION)})"
)
_BUILT_IN = re.compile(r"([A-Za-z_]\w*)\.call(?=\()")
_MEANT_AS_CALL = re.compile(r'\{\s*"(?:name|type|function)"\s*:')
_ARGUMENTS = ("parameters", "arguments")
_NEXT = re.compile(r'(?:;\s*|<\|python_tag\|>\s*)(?=\{\s*"(?:name|type|function)"\s*:)')
_SEPARATOR = re.compile(r"\s*(?:;\s*)?(?:<\|python_tag\|>\s*)?")


@register_tool_parser("llama3")
class Llama3Parser(TaggedParser):
    """Reads the three ways in which Llama 3.x calls.

    ``{"name": …, "parameters": {…}}``, several separated by ``;``, after ``<|python_tag|>`` or as
    the start of the turn; ``<|python_tag|>NAME.call(key="value")`` of the built-in tools;
    ``<function=NAME>{…}</function>``. Other code after ``<|python_tag|>`` is an invalid call. An
    object at the start that is no call is content.
    """

    stop_tokens = ("<|eot_id|>", "<|eom_id|>")
    opening = (
        r"(?P<tag><\|python_tag\|>)|<function=(?P<function>[^<>\n]*)>"
        rf"|(?:\A|(?<=</think>))\s*(?={OBJECT})"
    )

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        at = scan.skip_space(opening.end())
        if opening["function"] is not None:
            return _ARGUMENT.match(scan.text, at) is not None
        is_object = scan.text.startswith("{", at)
        return is_object or _CODE.match(scan.text, opening.end()) is not None

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        start, at = opening.start(), scan.skip_space(opening.end())
        if opening["function"] is not None:
            return _read_function(scan, opening)
        if scan.text.startswith("{", at):
            is_marked = opening["tag"] is not None
            return read_objects(scan, start if is_marked else at, at, is_marked=is_marked)
        call = _BUILT_IN.match(scan.text, at)
        if call is None:
            raise FaultyCall(f"expected a JSON call or NAME.call(…) after {TAG}")
        arguments, stop = read_arguments(scan.text, call.end())
        return scan.add_call(start, stop, call[1], arguments)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        if opening["function"] is not None:
            end = None if fault.is_cut else scan.nesting(_NESTED).stop(opening.end())
            return len(scan.text) if end is None else end
        # Another tag after code that opened a string may be quoted in it.
        is_code = _BUILT_IN.match(scan.text, scan.skip_space(opening.end())) is not None
        return len(scan.text) if is_code else scan.find(TAG, opening.end())


def read_objects(scan: TurnScan, start: int, at: int, *, is_marked: bool) -> int:
    """Add the JSON calls that begin at `at`, separated by ``;``; return the position after them.

    Args:
        scan: What to add to.
        start: Where the text of the first call begins, its mark included.
        at: Where its JSON begins.
        is_marked: Whether a mark says that calls follow; else one without arguments is content.
    """
    while True:
        try:
            value, stop = value_at(scan.text, at)
        except FaultyCall as error:
            if not is_marked and _MEANT_AS_CALL.match(scan.text, at) is None:
                scan.add_content(start, at + 1)
                return at + 1
            stop = len(scan.text)
            if not error.is_cut:
                stop = find_last_calls(scan.text, at + 1, _NEXT, _skip_object)
            scan.add_invalid(start, stop, str(error))
        else:
            if not is_marked and not _is_call(value):
                scan.add_content(start, stop)
                return stop
            scan.add_json_call(start, stop, value, *_ARGUMENTS)
        at = scan.skip_space(stop)
        at = scan.skip_space(at + 1) if scan.text.startswith(";", at) else at
        if not scan.text.startswith("{", at):
            return at
        start, is_marked = at, True


def _skip_object(text: str, at: int) -> int:
    if not text.startswith("{", at):
        raise FaultyCall("a call is an object", at)
    separator = _SEPARATOR.match(text, value_at(text, at)[1])
    assert separator is not None
    return separator.end()


def _is_call(value: object) -> bool:
    return isinstance(value, dict) and "name" in value and bool(value.keys() & _ARGUMENTS)


def _read_function(scan: TurnScan, opening: re.Match[str]) -> int:
    name = opening["function"].strip()
    if not name:
        raise FaultyCall("expected <function=NAME>")
    value, stop = value_at(scan.text, scan.skip_space(opening.end()))
    stop = scan.skip_space(stop)
    if not scan.text.startswith(END_FUNCTION, stop):
        raise FaultyCall(f"the call is not closed by {END_FUNCTION}")
    return scan.add_call(opening.start(), stop + len(END_FUNCTION), name, arguments_of(value))
