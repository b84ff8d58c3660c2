"""The Hermes format, also that of Qwen: ``<tool_call>{"name": …, "arguments": …}</tool_call>``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollout.chat.parsers.json_calls import GAP, FaultyCall, call_of, value_at
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser

if TYPE_CHECKING:
    from rollout.chat.parsers.scan import TurnScan

CALL, END_CALL = "<tool_call>", "</tool_call>"
_UNCLOSED = f"the call is not closed by {END_CALL}"
_NESTED = re.compile(rf"(?P<opens>{CALL}{GAP}[{{\[])|(?P<closes>{END_CALL})")


@register_tool_parser("hermes")
class HermesParser(TaggedParser):
    """A call ends at the ``</tool_call>`` after its JSON, so that arguments may contain tags.

    A tag that no JSON follows is content.
    """

    stop_tokens = ("<|im_end|>",)
    opening = CALL

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        is_twice = scan.text.startswith(CALL, opening.end()) and scan.is_at_line_start
        return is_twice or scan.is_meant(opening.end(), END_CALL)

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        try:
            return self._read_call(scan, opening.start(), scan.skip_space(opening.end()))
        except FaultyCall as fault:
            if scan.text.find(END_CALL, fault.at) >= 0:
                raise
            raise FaultyCall(_UNCLOSED, fault.at) from None

    def _read_call(self, scan: TurnScan, start: int, body: int) -> int:
        value, stop = value_at(scan.text, body)
        follower = scan.skip_space(stop)
        if scan.text.startswith(CALL, follower):
            end = scan.nesting(_NESTED).stop(body)  # else the next one is no part of it
            return scan.add_invalid(start, stop if end is None else end, _UNCLOSED)
        if not scan.text.startswith(END_CALL, follower):
            raise FaultyCall("malformed JSON: more text follows the call", follower)
        try:
            call = call_of(value)
        except FaultyCall as fault:
            fault.at = follower
            raise
        return scan.add_call(start, follower + len(END_CALL), call.name, call.arguments)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        stop = None if fault.is_cut else scan.nesting(_NESTED).stop(fault.at)
        return len(scan.text) if stop is None else stop
