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
    opening = r"<tool_call>(?P<name>[^<]*)"

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        start, name = opening.start(), opening["name"].strip()
        if not _is_meant(scan, opening, name):
            return scan.add_content(start, opening.start("name"))
        try:
            if _NAME.fullmatch(name) is None:
                raise FaultyCall(
                    "expected the name of a function", end_of_json(scan, opening.start("name"))
                )
            arguments, stop = _MARKUP.read(scan, opening.end(), name)
        except FaultyCall as fault:
            end = _MARKUP.end_of_faulty(scan, fault)
            return scan.add_faulty(start, fault, end, _BLOCK, _END_CALL)
        return scan.add_call(start, stop, name, arguments)


def _is_meant(scan: TurnScan, opening: re.Match[str], name: str) -> bool:
    """Whether a block was meant as a call, right or wrong."""
    after = opening.start("name")
    if scan.is_meant(after, _END_CALL):
        return True
    if _NAME.fullmatch(name) is None:
        return scan.nesting(_MARKUP.nested).end(opening.end()) is not None
    if scan.text.startswith("<arg_key>", opening.end()):
        return True
    is_tight = scan.text.startswith(name, after)
    if scan.text.startswith(_END_CALL, opening.end()):
        return name in scan.tool_names or (is_tight and not scan.tool_names)
    is_cut = opening.end() == len(scan.text) or scan.text.startswith("<tool_call>", opening.end())
    return is_cut and is_tight and scan.is_at_line_start
