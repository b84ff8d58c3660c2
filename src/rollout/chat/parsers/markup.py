"""Calls written as markup, such as ``<parameter=x>1</parameter></function>``.

Values have no types of their own; the tool's schema gives them (see `argument_types`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from rollout.chat.parsers.argument_types import ArgumentTypes
from rollout.chat.parsers.json_calls import FaultyCall, read_json
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.chat.parsers.scan import TurnScan


class CallMarkup:
    """How a format writes the parameters of a call.

    A value that may be text ends at the last end tag before the next parameter of the schema, or
    before the end of the call: what it quotes, calls of its own format included, is part of it.

    Args:
        call: Regular expression of what opens a call.
        parameter: Of what opens a parameter; group 1 is its name.
        end_parameter: Closes a parameter.
        end_call: Closes the call.
        tag: Of every tag of a call: a value that is no text must reach `end_parameter` before
            another.
        trim: Removes the line breaks of a value that are layout.
        block: What opens and closes a block of calls, which may be missing; or nothing.
        untyped_as_json: See `ArgumentTypes`.
    """

    def __init__(
        self,
        *,
        call: str,
        parameter: str,
        end_parameter: str,
        end_call: str,
        tag: str,
        trim: Callable[[str], str],
        block: tuple[str, str] = ("", ""),
        untyped_as_json: bool = False,
    ) -> None:
        self.parameter = re.compile(parameter)
        self.end_parameter = end_parameter
        self.end_call = end_call
        self.tag = re.compile(tag)
        self._trim = trim
        self._untyped_as_json = untyped_as_json
        begin, end = map(re.escape, block)
        end_value, end_of_call = re.escape(end_parameter), re.escape(end_call)
        end_of_block = rf"\s*{end}" if end else ""
        nameless = parameter.replace("(", "(?:", 1)
        self.nested = re.compile(
            rf"(?P<empty>{call}\s*{end_of_call})|(?P<opens>{call}\s*{nameless})"
            rf"|(?P<closes>{end_value}\s*{end_of_call})|(?P<splits>{end_value}\s*{nameless})"
        )
        #: The end of a call whose last value was never closed, and of its block, before another
        #: call or the end. Within a block, what follows may be quoted in that value: it never runs.
        self._bare_end = re.compile(
            rf"{end_value}\s*{end_of_call}|{call}\s*{end_of_call}"
            rf"|(?P<bare>{end_of_call + end_of_block})"
            rf"(?=\s*(?:(?:{begin}\s*)?{call}\s*(?:{nameless}|{end_of_call})|\Z))"
        )

    def read(self, scan: TurnScan, at: int, function: str) -> tuple[dict[str, Any], int]:
        """The arguments that start at `at`, and the end of the call.

        Of numbers and the like with equal names the last one counts; a text that is given twice may
        as well be one that quotes its own tags.

        Raises:
            FaultyCall: Something else stands there, or the text ends.
        """
        types = ArgumentTypes(scan.tools, function, untyped_as_json=self._untyped_as_json)
        arguments: dict[str, Any] = {}
        while not scan.text.startswith(self.end_call, at := scan.skip_space(at)):
            opening = self.parameter.match(scan.text, at)
            if opening is None:
                seen = scan.text[at : at + 20]
                reason = f"expected a parameter or {self.end_call}: {seen!r}"
                raise FaultyCall(
                    reason if seen else f"the call is not closed by {self.end_call}", at
                )
            name, body = opening[1].strip(), opening.end()
            is_text = types.may_be_text(name)
            if is_text and name in arguments:
                raise FaultyCall(f"the parameter {name!r} is given twice", body, is_in_value=True)
            stop = self._find_end_of_value(scan, name, body, types if is_text else None)
            arguments[name] = types.convert(name, self._trim(scan.text[body:stop]))
            at = stop + len(self.end_parameter)
        return arguments, at + len(self.end_call)

    def find_closing(self, scan: TurnScan, fault: FaultyCall) -> int | None:
        """Where a call with a fault ends, with all that its value quotes; None: at the next tag."""
        stop = scan.nesting(self.nested).find_stop(fault.at)
        if stop is not None or not fault.is_in_value:
            return stop
        ends = self._bare_end.finditer(scan.text, fault.at)
        return next((end.end() for end in ends if end["bare"] is not None), len(scan.text))

    def _find_end_of_value(
        self, scan: TurnScan, name: str, body: int, types: ArgumentTypes | None
    ) -> int:
        """Where the value that begins at `body` ends; with `types` it may be text, tags included."""
        nesting = scan.nesting(self.nested)
        end = None if types is None else nesting.find_end(body)
        if types is not None and end is not None:
            return self._find_end_of_text(scan, name, body, types, end)
        tag = self.tag.search(scan.text, body)
        is_closed = tag is not None and tag[0] == self.end_parameter
        if tag is not None and is_closed and types is None:
            return tag.start()
        reason = f"the parameter {name!r} is not closed by {self.end_parameter}"
        if types is not None:
            reason = f"the call is not closed by {self.end_call}" if is_closed else reason
            raise FaultyCall(reason, body, is_in_value=True)
        raise FaultyCall(reason, len(scan.text) if tag is None else tag.start())

    def _find_end_of_text(
        self, scan: TurnScan, name: str, body: int, types: ArgumentTypes, end: int
    ) -> int:
        nesting = scan.nesting(self.nested)
        first = nesting.find_before(body) + 1
        depth = nesting.depths[first - 1]
        while nesting.depths[first] >= depth:
            if nesting.kinds[first] == "splits" and nesting.depths[first] == depth:
                start, _ = nesting.spans[first]
                following = self.parameter.match(
                    scan.text, scan.skip_space(start + len(self.end_parameter))
                )
                if following is not None and types.declares(following[1].strip()):
                    return start
            first += 1
        if any(kind != "closes" for kind in nesting.kinds[first:end]):
            reason = f"{self.end_call} stands in the parameter {name!r}, or several calls are mixed"
            raise FaultyCall(reason, body, is_in_value=True)
        return nesting.spans[end][0]


def skip_json(scan: TurnScan, at: int) -> int:
    """After the JSON that begins at `at`, which may quote tags; `at` where there is none."""
    try:
        return read_json(scan.text, scan.skip_space(at))[1]
    except FaultyCall:
        return at


def trim_own_lines(value: str) -> str:
    """`value` without its outer line breaks where it stands on lines of its own."""
    on_own_lines = len(value) > 1 and value[0] == value[-1] == "\n"
    return value[1:-1] if on_own_lines else value


#: The beginning of a tag with which the text ends.
_CUT = re.compile(r"</?[a-z]+(?:=[^<>\n]*)?\Z")


class FunctionTagParser(TaggedParser):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.

    The tags of the block may be missing around a function, as models at times leave them out;
    ``</function>`` and each ``</parameter>`` may not. A tag that no call follows is content.
    """

    block: ClassVar[str]
    _markup: ClassVar[CallMarkup]
    _next: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        begin, end = f"<{cls.block}>", f"</{cls.block}>"
        cls.opening = rf"(?:{begin}\s*)?<function=(?P<name>[^<>\n]*)>|{begin}|<function="
        cls._next = re.compile(rf"{begin}|{end}|<function=")
        cls._markup = CallMarkup(
            call=r"<function=[^<>\n]*>",
            parameter=r"<parameter=([^<>\n]+)>",
            end_parameter="</parameter>",
            end_call="</function>",
            tag=rf"{begin}|{end}|</?(?:function|parameter)(?:=|>)",
            trim=lambda value: value.removeprefix("\n").removesuffix("\n"),
            block=(begin, end),
        )
        super().__init_subclass__()

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
        if scan.nesting(self._markup.nested).find_end(opening.end()) is not None:
            return True
        is_begun = scan.text.startswith(("<parameter=", "</function>"), at)
        is_code = scan.is_in_fence or scan.text.endswith("`", 0, opening.start())
        if is_code and not is_block and scan.text.startswith("</function>", at):
            return False
        is_cut = at == len(scan.text) or _CUT.match(scan.text, at) is not None
        if is_begun or (is_block and (is_cut or self._markup.tag.match(scan.text, at) is not None)):
            return not is_spaced or scan.is_at_line_start
        return False

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        name = (opening["name"] or "").strip().strip("\"'").strip()
        if not name:
            raise FaultyCall("expected <function=NAME>", skip_json(scan, opening.end()))
        arguments, stop = self._markup.read(scan, opening.end(), name)
        stop = scan.skip_tag(f"</{self.block}>", stop)
        return scan.add_call(opening.start(), stop, name, arguments)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        end_block, stop = f"</{self.block}>", self._markup.find_closing(scan, fault)
        if stop is not None:
            return scan.skip_tag(end_block, stop)
        return scan.find_next(max(fault.at, opening.start() + 1), self._next, end_block)


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


@register_tool_parser("glm4")
class Glm4Parser(TaggedParser):
    """GLM-4.5 and later: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…``.

    With and without line breaks between the tags (4.5 and 4.6 write them, 4.7 does not). A value
    whose parameter has no type in the schema is read as JSON where it is JSON other than a string,
    as the model's own template writes it.
    """

    stop_tokens = ("<|user|>", "<|observation|>", "<|endoftext|>")
    opening, _end = r"<tool_call>(?=(?P<name>[^<]*))", "</tool_call>"
    _name = re.compile(r"(?!\.\.\.|…)[^\s{}\"']+")
    _next = re.compile(r"</?tool_call>")
    _markup = CallMarkup(
        call=r"<tool_call>[^<]*",
        parameter=r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>",
        end_parameter="</arg_value>",
        end_call="</tool_call>",
        tag=r"</?(?:tool_call|arg_key|arg_value)>",
        trim=trim_own_lines,
        untyped_as_json=True,
    )

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        name, stop = opening["name"].strip(), opening.end("name")
        if scan.is_meant(opening.end(), self._end):
            return True
        if self._name.fullmatch(name) is None:
            return scan.nesting(self._markup.nested).find_end(stop) is not None
        if scan.text.startswith("<arg_key>", stop):
            return True
        is_tight = scan.text.startswith(name, opening.end())
        if scan.text.startswith(self._end, stop):
            return name in scan.tool_names or (is_tight and not scan.tool_names)
        is_cut = stop == len(scan.text) or scan.text.startswith("<tool_call>", stop)
        return is_cut and is_tight and scan.is_at_line_start

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        name = opening["name"].strip()
        if self._name.fullmatch(name) is None:
            raise FaultyCall("expected the name of a function", skip_json(scan, opening.end()))
        arguments, stop = self._markup.read(scan, opening.end("name"), name)
        return scan.add_call(opening.start(), stop, name, arguments)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        stop = self._markup.find_closing(scan, fault)
        at = max(fault.at, opening.start() + 1)
        return scan.find_next(at, self._next, self._end) if stop is None else stop
