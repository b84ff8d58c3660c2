"""GLM-4.5 and later: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollout.chat.parsers.markup import CallMarkup, FaultyCall, without_own_lines
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser

if TYPE_CHECKING:
    from rollout.chat.parsers.scan import TurnScan

_NAME = re.compile(r"[^\s{}\"']+")
_END_CALL = "</tool_call>"
_MARKUP = CallMarkup(
    parameter=re.compile(r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>"),
    end_parameter="</arg_value>",
    end_call=_END_CALL,
    tag=re.compile(r"</?(?:tool_call|arg_key|arg_value)>"),
    trimmed=without_own_lines,
    untyped_as_json=True,
)


@register_tool_parser("glm4")
class Glm4Parser(TaggedParser):
    """With and without line breaks between the tags (4.5 and 4.6 write them, 4.7 does not).

    A value whose parameter has no type in the schema is read as JSON where it is JSON other than
    a string, as the model's own template writes it.
    """

    stop_tokens = ("<|user|>", "<|observation|>", "<|endoftext|>")
    opening = r"<tool_call>(?P<name>[^<]*)"
    heads = ("<tool_call>",)

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        start, name = opening.start(), opening["name"].strip()
        try:
            if _NAME.fullmatch(name) is None:
                raise FaultyCall("expected the name of a function", opening.end())
            arguments, stop = _MARKUP.read(scan, opening.end(), name)
        except FaultyCall as fault:
            return _add_invalid(scan, start, fault)
        return scan.add_call(start, stop, name, arguments)


def _add_invalid(scan: TurnScan, start: int, fault: FaultyCall) -> int:
    """What is faulty reaches to the end of its block, or to where the next one begins."""
    for tag in _MARKUP.tag.finditer(scan.text, fault.at):
        if tag[0] == _END_CALL:
            return scan.add_invalid(start, tag.end(), str(fault))
        if tag[0] == "<tool_call>":
            return scan.add_invalid(start, tag.start(), str(fault))
    return scan.add_invalid(start, len(scan.text), str(fault))
