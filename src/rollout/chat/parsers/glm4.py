"""GLM-4.5 and later: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollout.chat.parsers.json_calls import FaultyCall
from rollout.chat.parsers.markup import CallMarkup, end_of_json, without_own_lines
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser

if TYPE_CHECKING:
    from rollout.chat.parsers.scan import TurnScan

_NAME = re.compile(r"(?!\.\.\.|…)[^\s{}\"']+")
_END_CALL = "</tool_call>"
_BLOCK = re.compile(r"</?tool_call>")
_MARKUP = CallMarkup(
    call=r"<tool_call>[^<]*",
    parameter=r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>",
    end_parameter="</arg_value>",
    end_call=_END_CALL,
    tag=r"</?(?:tool_call|arg_key|arg_value)>",
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
    opening = r"<tool_call>(?=(?P<name>[^<]*))"

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        name, stop = opening["name"].strip(), opening.end("name")
        if scan.is_meant(opening.end(), _END_CALL):
            return True
        if _NAME.fullmatch(name) is None:
            return scan.nesting(_MARKUP.nested).end(stop) is not None
        if scan.text.startswith("<arg_key>", stop):
            return True
        is_tight = scan.text.startswith(name, opening.end())
        if scan.text.startswith(_END_CALL, stop):
            return name in scan.tool_names or (is_tight and not scan.tool_names)
        is_cut = stop == len(scan.text) or scan.text.startswith("<tool_call>", stop)
        return is_cut and is_tight and scan.is_at_line_start

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        name = opening["name"].strip()
        if _NAME.fullmatch(name) is None:
            at = end_of_json(scan, opening.end())
            raise FaultyCall("expected the name of a function", at)
        arguments, stop = _MARKUP.read(scan, opening.end("name"), name)
        return scan.add_call(opening.start(), stop, name, arguments)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        stop = _MARKUP.find_closing(scan, fault)
        at = max(fault.at, opening.start() + 1)
        return scan.skip_to_tag(at, _BLOCK, _END_CALL) if stop is None else stop
