"""Mistral: ``[TOOL_CALLS]`` and an array of calls, or ``[TOOL_CALLS]name[ARGS]{…}`` each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollout.chat.parsers.json_calls import arguments_of, is_cut, value_at
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser

if TYPE_CHECKING:
    from rollout.chat.parsers.scan import TurnScan

MARK = "[TOOL_CALLS]"
#: What calls begin with: an array, or a name and arguments.
_BEGUN = re.compile(r"\[\s*(?:[{\]\"]|\Z)|\{|[^\[\]{}\n]*\[(?:ARGS|CALL_ID)\]")
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

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        at = scan.skip_space(opening.end())
        if not (scan.has_said_nothing or _BEGUN.match(scan.text, at)):
            return scan.add_content(*opening.span())
        try:
            if scan.text.startswith("[", at) and _HEAD.match(scan.text, at) is None:
                return self._read_array(scan, opening.start(), at)
            return self._read_named(scan, opening.start(), at)
        except ValueError as error:
            return scan.add_invalid(opening.start(), _end_of_faulty(scan, at), str(error))

    def _read_array(self, scan: TurnScan, start: int, at: int) -> int:
        at = scan.skip_space(at + 1)
        if scan.text.startswith("]", at):
            return scan.add_invalid(start, at + 1, "the array holds no call")
        while at < len(scan.text) and not scan.text.startswith("]", at):
            try:
                value, stop = value_at(scan.text, at)
            except ValueError as error:
                return scan.add_invalid(start, _end_of_faulty(scan, at), str(error))
            scan.add_json_call(start, stop, value, has_id=True)
            follower = scan.skip_space(stop)
            start = at = scan.skip_space(follower + scan.text.startswith(",", follower))
            if at == follower < len(scan.text) and scan.text[at] != "]":
                stop = _end_of_faulty(scan, at)
                return scan.add_invalid(at, stop, "expected , or ] after a call")
        return at + 1

    def _read_named(self, scan: TurnScan, start: int, at: int) -> int:
        head = _HEAD.match(scan.text, at)
        if head is None or not head[1].strip():
            raise ValueError("expected an array of calls, or NAME[ARGS] and JSON")
        value, stop = value_at(scan.text, scan.skip_space(head.end()))
        return scan.add_call(start, stop, head[1].strip(), arguments_of(value), head[2])


def _end_of_faulty(scan: TurnScan, at: int) -> int:
    """Where a fault ends: before calls that are well-formed, and nothing else, to the end.

    Other calls after it may be quoted in it.
    """
    text = scan.text
    start = scan.find(MARK, at)
    at = start
    while at < len(text):
        at = scan.skip_space(at + len(MARK))
        head = _HEAD.match(text, at)
        try:
            _, at = value_at(text, scan.skip_space(head.end()) if head is not None else at)
        except ValueError as error:
            if is_cut(str(error)):
                return len(text)
            is_clean = False
        else:
            at = scan.skip_space(at)
            is_clean = at == len(text) or text.startswith(MARK, at)
        if not is_clean:
            start = at = text.find(MARK, at)
            if at < 0:
                return len(text)
    return start
