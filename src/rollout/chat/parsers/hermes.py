"""The Hermes format, also that of Qwen: ``<tool_call>{"name": …, "arguments": …}</tool_call>``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.chat.parsers.json_calls import call_of, value_at
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser

if TYPE_CHECKING:
    import re

    from rollout.chat.parsers.scan import TurnScan

CALL, END_CALL = "<tool_call>", "</tool_call>"


@register_tool_parser("hermes")
class HermesParser(TaggedParser):
    """A call ends at the ``</tool_call>`` after its JSON, so that arguments may contain tags."""

    stop_tokens = ("<|im_end|>",)
    opening = CALL
    heads = (CALL,)

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        start, body = opening.start(), scan.skip_space(opening.end())
        try:
            value, stop = value_at(scan.text, body)
        except ValueError as error:
            return self._add_invalid(scan, start, body, str(error))
        follower = scan.skip_space(stop)
        if scan.text.startswith(CALL, follower):
            return scan.add_invalid(start, stop, f"the call is not closed by {END_CALL}")
        if not scan.text.startswith(END_CALL, follower):
            return self._add_invalid(
                scan, start, follower, "malformed JSON: more text follows the call"
            )
        try:
            call = call_of(value)
        except ValueError as error:
            return self._add_invalid(scan, start, follower, str(error))
        return scan.add_call(start, follower + len(END_CALL), call.name, call.arguments)

    def _add_invalid(self, scan: TurnScan, start: int, at: int, reason: str) -> int:
        end = scan.find(END_CALL, at)
        if end == len(scan.text):
            return scan.add_invalid(start, end, f"the call is not closed by {END_CALL}")
        return scan.add_invalid(start, end + len(END_CALL), reason)
