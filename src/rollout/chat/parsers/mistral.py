"""Mistral: ``[TOOL_CALLS]`` and an array of calls, or ``[TOOL_CALLS]name[ARGS]{…}`` each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollout.chat.parsers.json_calls import arguments_of, call_of, value_at
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser

if TYPE_CHECKING:
    from rollout.chat.parsers.scan import TurnScan

MARK = "[TOOL_CALLS]"
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
    heads = (MARK,)

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        at = scan.skip_space(opening.end())
        try:
            if scan.text.startswith("[", at) and _HEAD.match(scan.text, at) is None:
                return self._read_array(scan, opening.start(), at)
            return self._read_named(scan, opening.start(), at)
        except ValueError as error:
            return scan.add_invalid(opening.start(), scan.find(MARK, at), str(error))

    def _read_array(self, scan: TurnScan, start: int, at: int) -> int:
        at = scan.skip_space(at + 1)
        if scan.text.startswith("]", at):
            return scan.add_invalid(start, at + 1, "the array holds no call")
        while at < len(scan.text) and not scan.text.startswith("]", at):
            try:
                value, stop = value_at(scan.text, at)
            except ValueError as error:
                return scan.add_invalid(start, scan.find(MARK, at), str(error))
            _add(scan, start, stop, value)
            follower = scan.skip_space(stop)
            start = at = scan.skip_space(follower + scan.text.startswith(",", follower))
            if at == follower < len(scan.text) and scan.text[at] != "]":
                return scan.add_invalid(at, scan.find(MARK, at), "expected , or ] after a call")
        return at + 1

    def _read_named(self, scan: TurnScan, start: int, at: int) -> int:
        head = _HEAD.match(scan.text, at)
        if head is None or not head[1].strip():
            raise ValueError("expected an array of calls, or NAME[ARGS] and JSON")
        value, stop = value_at(scan.text, scan.skip_space(head.end()))
        return scan.add_call(start, stop, head[1].strip(), arguments_of(value), head[2])


def _add(scan: TurnScan, start: int, stop: int, value: object) -> None:
    try:
        call = call_of(value)
    except ValueError as error:
        scan.add_invalid(start, stop, str(error))
    else:
        scan.add_call(start, stop, call.name, call.arguments, call.id)
