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
_NESTED = re.compile(rf"(?P<opens>{CALL}{GAP}[{{\[])|(?P<closes>{END_CALL})")


@register_tool_parser("hermes")
class HermesParser(TaggedParser):
    """A call ends at the ``</tool_call>`` after its JSON, so that arguments may contain tags.

    A tag that no JSON follows is content.
    """

    stop_tokens = ("<|im_end|>",)
    opening = CALL

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        start, body = opening.start(), scan.skip_space(opening.end())
        if not self._is_meant(scan, opening):
            return scan.add_content(*opening.span())
        try:
            value, stop = value_at(scan.text, body)
        except FaultyCall as error:
            return self._add_invalid(scan, start, body, error)
        follower = scan.skip_space(stop)
        if scan.text.startswith(CALL, follower):
            end = scan.nesting(_NESTED).stop(body)  # else the next one is no part of it
            stop = stop if end is None else end
            return scan.add_invalid(start, stop, f"the call is not closed by {END_CALL}")
        if not scan.text.startswith(END_CALL, follower):
            fault = FaultyCall("malformed JSON: more text follows the call")
            return self._add_invalid(scan, start, follower, fault)
        try:
            call = call_of(value)
        except FaultyCall as error:
            return self._add_invalid(scan, start, follower, error)
        return scan.add_call(start, follower + len(END_CALL), call.name, call.arguments)

    def _is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        is_twice = scan.text.startswith(CALL, opening.end()) and scan.is_at_line_start
        return is_twice or scan.is_meant(opening.end(), END_CALL)

    def _add_invalid(self, scan: TurnScan, start: int, at: int, fault: FaultyCall) -> int:
        """What is faulty reaches to its end tag, past what it quotes."""
        stop = None if fault.is_cut else scan.nesting(_NESTED).stop(at)
        if stop is not None:
            return scan.add_invalid(start, stop, str(fault))
        is_closed = END_CALL in scan.text[at:]
        reason = str(fault) if is_closed else f"the call is not closed by {END_CALL}"
        return scan.add_invalid(start, len(scan.text), reason)
