"""Calls as a Python list, ``[f(x=1), g(y="a")]``: Llama 4, Llama 3.2 and prompted models."""

from __future__ import annotations

import re

from rollout.chat.parsers.json_calls import FaultyCall
from rollout.chat.parsers.python_calls import read_call_list
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser, TurnScan

#: What a list of calls begins with: the first function's name, and whether the rest is no sentence:
#: its arguments have names, or it has none and the list continues as one.
CALL_LIST = (
    r"\[(?=\s*+(?P<name>[A-Za-z_][\w.]*+)\s*+\("
    r"(?P<named>\s*+(?:\)\s*+[],]|[A-Za-z_]\w*+\s*+=\s*+[\w+.\"'\[({-]))?)"
)
_LIST = re.compile(CALL_LIST)
#: Dots stand for arguments where a list is spoken of.
_DOTS = re.compile(r"\[\s*[\w.]+\(\s*(?:\.\.\.|…)")
_START, _END = "<|python_start|>", "<|python_end|>"


@register_tool_parser("pythonic")
class PythonicParser(TaggedParser):
    """Arguments are literals by name; nothing is evaluated.

    A list that is malformed is one invalid call where it begins a line, follows
    ``<|python_start|>`` or names a tool that is offered; elsewhere it is content, since prose
    and mathematics write ``[f(x), g(x)]`` as well.
    """

    stop_tokens = ("<|eot|>", "<|eom|>", "<|eot_id|>", "<|eom_id|>")
    opening = rf"<\|python_(?:start|end)\|>|{CALL_LIST}"
    nested = re.compile(
        rf"(?P<opens>{re.escape(_START)}\s*\[\s*[A-Za-z_][\w.]*\s*\()|(?P<closes>{re.escape(_END)})"
    )

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        if opening[0] == _END:
            return scan.follows_call(opening.start())
        at = scan.skip_space(opening.end())
        return opening[0] != _START or _LIST.match(scan.text, at) is not None

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        if opening[0] == _END:
            return scan.end_call(opening.end())
        if opening[0] != _START:
            return add_call_list(scan, opening)
        first = _LIST.search(scan.text, opening.end())
        assert first is not None
        return add_call_list(scan, first, is_marked=True)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        fault.at = opening.end()
        return super().find_end(scan, opening, fault) if opening[0] == _START else len(scan.text)


def add_call_list(scan: TurnScan, opening: re.Match[str], *, is_marked: bool = False) -> int:
    """Add the calls of the list that `opening` begins; return the position after it."""
    name, named = opening.group("name", "named")
    is_meant = is_marked or scan.is_at_line_start or name in scan.tool_names
    if named is None and not is_meant:
        return scan.add_content(*opening.span())
    start = opening.start()
    try:
        calls, stop = read_call_list(scan.text, start)
    except FaultyCall as fault:
        if is_meant and _DOTS.match(scan.text, start) is None:
            raise
        return scan.add_content(start, max(fault.at, opening.end()))
    for call in calls:
        scan.add_call(call.start, call.stop, call.name, call.arguments)
    return scan.end_call(stop)
