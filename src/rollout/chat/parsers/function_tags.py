"""Qwen3-Coder and Seed-OSS: ``<function=f><parameter=x>1</parameter></function>`` in a block."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from rollout.chat.parsers.markup import CallMarkup, FaultyCall, without_layout
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser

if TYPE_CHECKING:
    from rollout.chat.parsers.scan import TurnScan


class FunctionTagParser(TaggedParser):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.

    The tags of the block may be missing around a function, as models at times leave them out;
    ``</function>`` and each ``</parameter>`` may not. A value ends at its ``</parameter>``; where
    another tag of the format comes first, the call is invalid.
    """

    block: ClassVar[str]
    markup: ClassVar[CallMarkup]

    def __init_subclass__(cls) -> None:
        cls.opening = (
            rf"(?:<{cls.block}>\s*)?<function=(?P<name>[^<>\n]*)>|<{cls.block}>|<function="
        )
        cls.heads = (f"<{cls.block}>", "<function=")
        cls.markup = CallMarkup(
            parameter=re.compile(r"<parameter=([^<>\n]+)>"),
            end_parameter="</parameter>",
            end_call="</function>",
            tag=re.compile(rf"</?{cls.block}>|</?(?:function|parameter)(?:=|>)"),
            trimmed=without_layout,
        )
        super().__init_subclass__()

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        start, name = opening.start(), (opening["name"] or "").strip().strip("\"'").strip()
        try:
            if not name:
                raise FaultyCall("expected <function=NAME>", opening.end())
            arguments, stop = self.markup.read(scan, opening.end(), name)
        except FaultyCall as fault:
            return self._add_invalid(scan, start, fault)
        end_block = f"</{self.block}>"
        follower = scan.skip_space(stop)
        if scan.text.startswith(end_block, follower):
            stop = follower + len(end_block)
        return scan.add_call(start, stop, name, arguments)

    def _add_invalid(self, scan: TurnScan, start: int, fault: FaultyCall) -> int:
        """What is faulty reaches to the end of its block, or to where the next one begins."""
        for tag in self.markup.tag.finditer(scan.text, fault.at):
            if tag[0] == f"</{self.block}>":
                return scan.add_invalid(start, tag.end(), str(fault))
            if tag[0] in (f"<{self.block}>", "<function=") and tag.start() > start:
                return scan.add_invalid(start, tag.start(), str(fault))
        return scan.add_invalid(start, len(scan.text), str(fault))


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
