"""Mistral: ``[TOOL_CALLS]`` and an array of calls, or ``[TOOL_CALLS]name[ARGS]{…}`` each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollout.chat.parsers.json_calls import FaultyCall, arguments_of, skip_space, value_at
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser, find_last_calls

if TYPE_CHECKING:
    from rollout.chat.parsers.scan import TurnScan

MARK = "[TOOL_CALLS]"
#: What calls begin with: an array, or a name and arguments.
_BEGUN = re.compile(r"\[\s*(?:[{\]\"]|\Z)|\{|[^\[\]{}\n]*\[(?:ARGS|CALL_ID)\]")
#: Where the next call begins.
_NEXT = re.compile(rf"(?={re.escape(MARK)})")
_HEAD = re.compile(r"([^\[\]{}\n]*)(?:\[CALL_ID\]([^\[\]{}\n]*))?\[ARGS\]")


@register_tool_parser("mistral")
class MistralParser(TaggedParser):
    """Tokenizers up to v7 write an array, later ones a name, perhaps an id, and arguments.

    What is malformed reaches to the next ``[TOOL_CALLS]`` or to the end; calls of an array that
    stand before the fault are kept.
    """

    stop_tokens = ("</s>",)
    reasoning_tags = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
    opening = re.escape(MARK)

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        at = scan.skip_space(opening.end())
        return scan.has_said_nothing or _BEGUN.match(scan.text, at) is not None

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        at = scan.skip_space(opening.end())
        if scan.text.startswith("[", at) and _HEAD.match(scan.text, at) is None:
            return self._read_array(scan, opening.start(), at)
        return self._read_named(scan, opening.start(), at)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        return find_last_calls(scan.text, opening.end(), _NEXT, _skip_call)

    def _read_array(self, scan: TurnScan, start: int, at: int) -> int:
        at = scan.skip_space(at + 1)
        if scan.text.startswith("]", at):
            return scan.add_invalid(start, at + 1, "the array holds no call")
        while at < len(scan.text) and not scan.text.startswith("]", at):
            try:
                value, stop = value_at(scan.text, at)
            except FaultyCall as fault:
                return _add_faulty(scan, start, at, str(fault))
            scan.add_json_call(start, stop, value, has_id=True)
            follower = scan.skip_space(stop)
            start = at = scan.skip_space(follower + scan.text.startswith(",", follower))
            if at == follower < len(scan.text) and scan.text[at] != "]":
                return _add_faulty(scan, at, at, "expected , or ] after a call")
        return at + 1

    def _read_named(self, scan: TurnScan, start: int, at: int) -> int:
        head = _HEAD.match(scan.text, at)
        if head is None or not head[1].strip():
            raise FaultyCall("expected an array of calls, or NAME[ARGS] and JSON")
        value, stop = value_at(scan.text, scan.skip_space(head.end()))
        return scan.add_call(start, stop, head[1].strip(), arguments_of(value), head[2])


def _add_faulty(scan: TurnScan, start: int, at: int, reason: str) -> int:
    return scan.add_invalid(start, find_last_calls(scan.text, at, _NEXT, _skip_call), reason)


def _skip_call(text: str, at: int) -> int:
    at = skip_space(text, at + len(MARK))
    head = _HEAD.match(text, at)
    body = at if head is None else skip_space(text, head.end())
    try:
        stop = skip_space(text, value_at(text, body)[1])
    except FaultyCall as fault:
        fault.at = at
        raise
    if stop < len(text) and not text.startswith(MARK, stop):
        raise FaultyCall("more text follows the call", stop)
    return stop
