"""Llama 3: calls as JSON objects at the start of a turn or after ``<|python_tag|>``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollout.chat.parsers.json_calls import arguments_of, call_of, value_at
from rollout.chat.parsers.literals import PythonReader
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser

if TYPE_CHECKING:
    from rollout.chat.parsers.scan import TurnScan

#: How an object in JSON begins.
OBJECT = r"\{\s*[\"}]"
#: What may become that, white space before it.
MAYBE_OBJECT = r"\s*(?:\Z|\{\s*(?:\Z|[\"}]))"
TAG, END_FUNCTION = "<|python_tag|>", "</function>"

_BUILT_IN = re.compile(r"([A-Za-z_]\w*)\.call\(")
_MEANT_AS_CALL = re.compile(r'\{\s*"(?:name|type|function)"\s*:')
_ARGUMENTS = ("parameters", "arguments")
_NEXT = re.compile(r';\s*(?=\{\s*"(?:name|type|function)"\s*:)')


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

    heads = (TAG, "<function=")
    heads_at_start = MAYBE_OBJECT

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        if opening["function"] is not None:
            return _read_function(scan, opening)
        at = scan.skip_space(opening.end())
        if scan.text.startswith("{", at):
            is_marked = opening["tag"] is not None
            start = opening.start() if is_marked else at
            return read_objects(scan, start, at, is_marked=is_marked)
        return _read_built_in(scan, opening.start(), at)


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
        except ValueError as error:
            if not is_marked and _MEANT_AS_CALL.match(scan.text, at) is None:
                scan.add_content(start, at + 1)
                return at + 1
            stop = scan.find(TAG, at)
            following = _NEXT.search(scan.text, at + 1, stop)
            stop = stop if following is None else following.start()
            scan.add_invalid(start, stop, str(error))
        else:
            if not is_marked and not _is_call(value):
                scan.add_content(start, stop)
                return stop
            _add(scan, start, stop, value)
        at = scan.skip_space(stop)
        at = scan.skip_space(at + 1) if scan.text.startswith(";", at) else at
        if not scan.text.startswith("{", at):
            return at
        start, is_marked = at, True


def _is_call(value: object) -> bool:
    return isinstance(value, dict) and "name" in value and bool(value.keys() & _ARGUMENTS)


def _add(scan: TurnScan, start: int, stop: int, value: object) -> None:
    try:
        call = call_of(value, *_ARGUMENTS)
    except ValueError as error:
        scan.add_invalid(start, stop, str(error))
    else:
        scan.add_call(start, stop, call.name, call.arguments)


def _read_function(scan: TurnScan, opening: re.Match[str]) -> int:
    start, name = opening.start(), opening["function"].strip()
    try:
        if not name:
            raise ValueError("expected <function=NAME>")
        value, stop = value_at(scan.text, scan.skip_space(opening.end()))
        stop = scan.skip_space(stop)
        if not scan.text.startswith(END_FUNCTION, stop):
            raise ValueError(f"the call is not closed by {END_FUNCTION}")
        arguments = arguments_of(value)
    except ValueError as error:
        stop = scan.find(END_FUNCTION, opening.end())
        return scan.add_invalid(start, min(stop + len(END_FUNCTION), len(scan.text)), str(error))
    return scan.add_call(start, stop + len(END_FUNCTION), name, arguments)


def _read_built_in(scan: TurnScan, start: int, at: int) -> int:
    call = _BUILT_IN.match(scan.text, at)
    try:
        if call is None:
            raise ValueError(f"expected a JSON call or NAME.call(…) after {TAG}")
        reader = PythonReader(scan.text, call.end(), scan.budget)
        arguments = reader.keywords()
    except ValueError as error:
        return scan.add_invalid(start, scan.find(TAG, at), str(error))
    return scan.add_call(start, reader.at, call[1], arguments)
