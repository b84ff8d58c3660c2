"""Qwen3-Coder and Seed-OSS: ``<function=f><parameter=x>1</parameter></function>`` in a block."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from rollout.chat.parsers.json_calls import FaultyCall
from rollout.chat.parsers.markup import CallMarkup, end_of_json, without_layout
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser

if TYPE_CHECKING:
    from rollout.chat.parsers.scan import TurnScan


#: The beginning of a tag with which the text ends.
_CUT = re.compile(r"</?[a-z]+(?:=[^<>\n]*)?\Z")


class FunctionTagParser(TaggedParser):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.

    The tags of the block may be missing around a function, as models at times leave them out;
    ``</function>`` and each ``</parameter>`` may not. A tag that no call follows is content.
    """

    block: ClassVar[str]
    markup: ClassVar[CallMarkup]
    blocks: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        cls.opening = (
            rf"(?:<{cls.block}>\s*)?<function=(?P<name>[^<>\n]*)>|<{cls.block}>|<function="
        )
        cls.blocks = re.compile(rf"</?{cls.block}>|<function=")
        cls.markup = CallMarkup(
            call=r"<function=[^<>\n]*>",
            parameter=r"<parameter=([^<>\n]+)>",
            end_parameter="</parameter>",
            end_call="</function>",
            block=(f"<{cls.block}>", f"</{cls.block}>"),
            tag=rf"</?{cls.block}>|</?(?:function|parameter)(?:=|>)",
            trimmed=without_layout,
        )
        super().__init_subclass__()

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        name = (opening["name"] or "").strip().strip("\"'").strip()
        if not name:
            raise FaultyCall("expected <function=NAME>", end_of_json(scan, opening.end()))
        arguments, stop = self.markup.read(scan, opening.end(), name)
        return scan.add_call(opening.start(), self._end_of_block(scan, stop), name, arguments)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        stop = self.markup.find_closing(scan, fault)
        if stop is not None:
            return self._end_of_block(scan, stop)
        at = max(fault.at, opening.start() + 1)
        return scan.skip_to_tag(at, self.blocks, f"</{self.block}>")

    def _end_of_block(self, scan: TurnScan, stop: int) -> int:
        end_block = f"</{self.block}>"
        follower = scan.skip_space(stop)
        return follower + len(end_block) if scan.text.startswith(end_block, follower) else stop

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        at = scan.skip_space(opening.end())
        is_block = opening[0].startswith(f"<{self.block}>")
        is_spaced = at > opening.end() and "\n" not in scan.text[opening.end() : at]
        if opening["name"] is None:
            if not is_block:
                return False
            if scan.text.startswith("<function=", at) or _CUT.match(scan.text, at) is not None:
                return not is_spaced or scan.is_at_line_start
            return scan.is_meant(opening.end(), f"</{self.block}>")
        if scan.nesting(self.markup.nested).end(opening.end()) is not None:
            return True
        is_begun = scan.text.startswith(("<parameter=", "</function>"), at)
        is_code = scan.is_in_fence or scan.text.endswith("`", 0, opening.start())
        if is_code and not is_block and scan.text.startswith("</function>", at):
            return False
        is_cut = at == len(scan.text) or _CUT.match(scan.text, at) is not None
        if is_begun or (is_block and (is_cut or self.markup.tag.match(scan.text, at) is not None)):
            return not is_spaced or scan.is_at_line_start
        return False


@register_tool_parser("qwen3_coder")
class Qwen3CoderParser(FunctionTagParser):
    """The format of Qwen3-Coder."""

    stop_tokens = ("<|im_end|>",)
    block = "tool_call"


@register_tool_parser("seed_oss")
class SeedOssParser(FunctionTagParser):
    """The format of Seed-OSS."""

    stop_tokens = ("<seed:eos>",)
    reasoning_tags = (("<seed:think>", "</seed:think>"), ("<think>", "</think>"))
    block = "seed:tool_call"
