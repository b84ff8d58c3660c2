"""Formats that put all calls of a turn into one section, each call between tags of its own."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from rollout.chat.parsers.json_calls import FaultyCall, read_arguments, read_json
from rollout.chat.parsers.markup import CallMarkup, trim_own_lines
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser

if TYPE_CHECKING:
    from rollout.chat.parsers.scan import TurnScan


class SectionParser(TaggedParser):
    """Reads the calls of a section one by one; one that is faulty leaves the others alone.

    The end of a section may be missing, the end of a call may not. Text in a section that is no
    call is an invalid call. A tag that no call follows is content; an end tag right after a call
    is nothing.

    Attributes:
        section: What opens and closes a section.
        call: Regular expression of what opens a call.
        end_call: What closes it.
        is_call_special: Whether what opens a call is a special token, which counts on its own.
        begun: Regular expression of how a call begins.
    """

    section: ClassVar[tuple[str, str]]
    call: ClassVar[str]
    end_call: ClassVar[str]
    is_call_special: ClassVar[bool] = True
    begun: ClassVar[re.Pattern[str]]
    _call: ClassVar[re.Pattern[str]]
    _next: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        if "section" in vars(cls):
            section = "|".join(map(re.escape, cls.section))
            call = f"{cls.call}|{re.escape(cls.end_call)}"
            cls.opening = f"{section}|{call}" if cls.is_call_special else section
            cls._call = re.compile(cls.call)
            cls._next = re.compile(f"{section}|{call}")
        super().__init_subclass__()

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        begin, end = self.section
        if opening[0] in (end, self.end_call):
            return scan.follows_call(opening.start())
        if opening[0] != begin:
            return self.begun.match(scan.text, opening.start()) is not None
        following = self._next.search(scan.text, opening.end())
        if following is None:
            return False
        if self.begun.match(scan.text, following.start()) is not None:
            return True
        gap = scan.text[opening.end() : following.start()]
        if not gap.strip() and self._call.match(scan.text, following.start()) is not None:
            return "\n" in gap or not gap or scan.is_at_line_start
        return scan.is_meant(opening.end(), end)

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        begin, end = self.section
        if opening[0] in (end, self.end_call):
            return scan.end_call(opening.end())
        if opening[0] != begin:
            return self._read_one(scan, opening.start())
        first = at = scan.skip_space(opening.end())
        while at < len(scan.text) and not scan.text.startswith((begin, end), at):
            at = scan.skip_space(self._read_one(scan, at))
            while scan.text.startswith(self.end_call, at):  # written twice, right after a call
                at = scan.skip_space(at + len(self.end_call))
        if at == first:
            return scan.add_invalid(opening.start(), at, f"no call stands before {end}")
        return at

    def _read_one(self, scan: TurnScan, start: int) -> int:
        try:
            opening = self._call.match(scan.text, start)
            if opening is None:
                seen = scan.text[start : start + 20]
                raise FaultyCall(f"expected a call in the section: {seen!r}", start + 1)
            return self.read_one(scan, opening)
        except FaultyCall as fault:
            stop = self.find_closing(scan, fault)
            if stop is None:
                stop = scan.find_next(max(fault.at, start + 1), self._next, self.end_call)
            return scan.add_invalid(start, stop, str(fault))

    @abstractmethod
    def read_one(self, scan: TurnScan, opening: re.Match[str]) -> int:
        """Add the call that `opening` opens; return the position after it.

        Raises:
            FaultyCall: It is none; it then ends at the next tag from where the fault is.
        """

    @abstractmethod
    def find_closing(self, scan: TurnScan, fault: FaultyCall) -> int | None:
        """Where a call with a fault ends, with all that it quotes; None: at the next tag."""


class JsonSectionParser(SectionParser):
    """Calls are a head, a separator and the arguments as JSON."""

    separator: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        head = rf"{cls.call}[^<]{{0,300}}{re.escape(cls.separator)}"
        cls.begun = re.compile(rf"{head}\s*(?:[{{\[\"]|\w[^\s<]*\s*\n)")
        cls.nested = re.compile(rf"(?P<opens>{head})|(?P<closes>{re.escape(cls.end_call)})")

    @abstractmethod
    def read_head(self, scan: TurnScan, head: str, body: int) -> tuple[str, str | None, int]:
        """The name of the function, the model's own id of the call, and where the JSON is.

        Raises:
            FaultyCall: The head names no function.
        """

    def find_closing(self, scan: TurnScan, fault: FaultyCall) -> int | None:
        if fault.is_cut:
            return len(scan.text)
        if self._next.match(scan.text, fault.at) is not None:
            return None
        stop = scan.nesting(self.nested).find_stop(fault.at)
        return len(scan.text) if stop is None and fault.is_in_value else stop

    def read_one(self, scan: TurnScan, opening: re.Match[str]) -> int:
        tag = self._next.search(scan.text, opening.end())
        limit = len(scan.text) if tag is None else tag.start()
        split = scan.text.find(self.separator, opening.end(), limit)
        if split < 0:
            raise FaultyCall(f"expected {self.separator} in the call", limit)
        head = scan.text[opening.end() : split].strip()
        name, call_id, body = self.read_head(scan, head, split + len(self.separator))
        try:
            value, stop = read_json(scan.text, scan.skip_space(body))
            arguments = read_arguments(value)
        except FaultyCall as error:
            error.at, error.is_in_value = body, True
            raise
        stop = scan.skip_space(scan.skip_tag("```", stop))
        if not scan.text.startswith(self.end_call, stop):
            raise FaultyCall(f"the call is not closed by {self.end_call}", stop, is_in_value=True)
        return scan.add_call(
            opening.start(), stop + len(self.end_call), name, arguments, call_id=call_id
        )


@register_tool_parser("deepseek_v3")
class DeepSeekV3Parser(JsonSectionParser):
    """DeepSeek V3 and R1 (``function``, separator, name, fenced JSON), V3.1 (name, JSON)."""

    stop_tokens = ("<｜end▁of▁sentence｜>",)
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = "<｜tool▁call▁begin｜>"
    end_call = "<｜tool▁call▁end｜>"
    separator = "<｜tool▁sep｜>"
    _fenced = re.compile(r"\s{0,8}([^\s`{][^\n`<]{0,255})\n\s{0,8}```[a-z]{0,8}")

    def read_head(self, scan: TurnScan, head: str, body: int) -> tuple[str, str | None, int]:
        fenced = self._fenced.match(scan.text, body) if head == "function" else None
        if fenced is not None:
            return fenced[1].strip(), None, fenced.end()
        if not head or "\n" in head:
            raise FaultyCall(f"expected the name of a function before {self.separator}", body)
        return head, None, body


@register_tool_parser("kimi_k2")
class KimiK2Parser(JsonSectionParser):
    """Kimi K2; a call's id, ``functions.NAME:INDEX``, names the function and stays."""

    stop_tokens = ("<|im_end|>",)
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = re.escape("<|tool_call_begin|>")
    end_call = "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"

    def read_head(self, scan: TurnScan, head: str, body: int) -> tuple[str, str | None, int]:
        name = head.partition(":")[0].removeprefix("functions.")
        if not name or name.isdigit() or any(sign.isspace() for sign in head):
            raise FaultyCall(f"expected functions.NAME:INDEX, not {head[:40]!r}", body)
        return name, head, body


@register_tool_parser("minimax_m2")
class MiniMaxM2Parser(SectionParser):
    """MiniMax M2: ``<minimax:tool_call><invoke name="f"><parameter name="x">1</parameter>…``."""

    stop_tokens = ("[e~[",)
    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    call = r"<invoke name=[\"']?(?P<name>[^\"'<>\n]*)[\"']?>"
    end_call = "</invoke>"
    is_call_special = False
    _markup = CallMarkup(
        call=call.replace("?P<name>", "?:"),
        parameter=r"<parameter name=[\"']?([^\"'<>\n]+)[\"']?>",
        end_parameter="</parameter>",
        end_call="</invoke>",
        block=section,
        tag=r"</?(?:minimax:tool_call|invoke|parameter)(?: name=|>)",
        trim=trim_own_lines,
    )
    begun = re.compile(rf"{call}\s*(?:<parameter name=|</invoke>)")

    def find_closing(self, scan: TurnScan, fault: FaultyCall) -> int | None:
        return self._markup.find_closing(scan, fault)

    def read_one(self, scan: TurnScan, opening: re.Match[str]) -> int:
        name = opening["name"].strip()
        if not name:
            raise FaultyCall('expected <invoke name="NAME">', opening.end())
        arguments, stop = self._markup.read(scan, opening.end(), name)
        return scan.add_call(opening.start(), stop, name, arguments)
