"""Formats that write calls as markup, such as ``<parameter=x>1</parameter></function>``.

Values have no types of their own; the tool's schema gives them (see `argument_types`).
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, ClassVar

from rollout.chat.parsers.argument_types import ArgumentTypes
from rollout.chat.parsers.json_calls import FaultyCall, read_json
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser, TurnScan


class MarkupParser(TaggedParser):
    """Calls are a tag that names the function, parameters between tags, and an end tag.

    The tags of a block may be missing around a call, as models at times leave them out, unless the
    format needs them; the end tags of a call and of each parameter may not. A tag that no call
    follows is content.

    A value ends at the last end tag before the next parameter of the schema, or
    before the end of the call: what it quotes, calls of its own format included, is part of it.

    Attributes:
        block: What opens and closes a block of calls; empty where there is none.
        needs_block: Whether a call outside a block is text, as one of another model may be.
        call: Regular expression of what opens a call; the group ``name`` names the function.
        name: What is the name of a function.
        example: What opens a call, for the reason of an invalid one.
        end_call: Closes the call.
        parameter: Regular expression of what opens a parameter; group 1 is its name.
        end_parameter: Closes a parameter.
        untyped_as_json: See `ArgumentTypes`.
    """

    block: ClassVar[tuple[str, str]] = ("", "")
    needs_block: ClassVar[bool] = False
    call: ClassVar[str]
    name: ClassVar[re.Pattern[str]] = re.compile(r"[^<>]*[^\s<>\"'][^<>]*")
    example: ClassVar[str]
    end_call: ClassVar[str]
    parameter: ClassVar[str]
    end_parameter: ClassVar[str]
    untyped_as_json: ClassVar[bool] = False
    _parameter: ClassVar[re.Pattern[str]]
    _next: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        begin, _ = cls.block
        call, parameter = cls.call.replace("?P<name>", "?:"), cls.parameter.replace("(", "(?:", 1)
        cls.opening = rf"(?:{begin}\s*)?{cls.call}|{begin}" if begin else cls.call
        cls._next = re.compile("|".join([*filter(None, cls.block), call, cls.end_call]))
        cls._parameter = re.compile(cls.parameter)
        cls.nested = re.compile(
            rf"(?P<empty>{call}\s*{cls.end_call})|(?P<opens>{call}\s*{parameter})"
            rf"|(?P<closes>{cls.end_parameter}\s*{cls.end_call})"
            rf"|(?P<splits>{cls.end_parameter}\s*{parameter})"
        )
        super().__init_subclass__()

    @staticmethod
    def trim(value: str) -> str:
        """`value` without its outer line breaks where it stands on lines of its own."""
        on_own_lines = len(value) > 1 and value[0] == value[-1] == "\n"
        return value[1:-1] if on_own_lines else value

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        text, at, is_block = scan.text, opening.end(), opening[0].startswith(self.block[0])
        if opening["name"] is None:
            tag = self._next.search(text, at) if self.needs_block else None
            is_before_call = tag is not None and self.nested.match(text, tag.start()) is not None
            head = self.example.partition("NAME")[0]  # of a call whose tag is broken
            is_begun = text.startswith(head, scan.skip_space(at))
            return is_before_call or is_begun or scan.is_meant(at, self.block[1])
        follower = scan.skip_space(at)
        if self.needs_block and not is_block:
            is_in_block = scan.end_of_call >= 0 and not scan.has_ended(self.block[1])
            is_begun = self.nested.match(text, opening.start()) is not None
            return is_in_block and (is_begun or scan.follows_call(opening.start()))
        if scan.nesting(self.nested).find_end(at) is not None:
            return True
        if text.startswith(self.end_call, follower):
            is_code = scan.is_in_fence or text.endswith("`", 0, opening.start())
            return is_block or not is_code
        return is_block or self._parameter.match(text, follower) is not None

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        if self.name.fullmatch(opening["name"] or "") is None:
            at = opening.end() if opening["name"] is None else opening.start("name")
            with suppress(FaultyCall):  # JSON, as other formats write calls, may quote tags
                at = read_json(scan.text, scan.skip_space(at))[1]
            raise FaultyCall(f"expected {self.example}", at, is_open=False)
        name = opening["name"].strip().strip("\"'").strip()
        arguments, stop = self._read_parameters(scan, opening.end(), name)
        return scan.add_call(opening.start(), scan.skip_tag(self.block[1], stop), name, arguments)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        stop = scan.nesting(self.nested).find_stop(fault.at)
        if stop is None and fault.is_open:
            return len(scan.text)
        if stop is None:
            tag = self._next.search(scan.text, max(fault.at, opening.start() + 1))
            is_end = tag is not None and tag[0] in (self.end_call, self.block[1])
            stop = len(scan.text) if tag is None else tag.end() if is_end else tag.start()
        return scan.skip_tag(self.block[1], stop)

    def _read_parameters(
        self, scan: TurnScan, at: int, function: str
    ) -> tuple[dict[str, Any], int]:
        """The arguments that start at `at`, and the end of the call.

        A value that is given twice may as well be one that quotes its own tags.

        Raises:
            FaultyCall: Something else stands there, or the text ends.
        """
        types = ArgumentTypes(scan.tools, function, untyped_as_json=self.untyped_as_json)
        arguments: dict[str, Any] = {}
        while not scan.text.startswith(self.end_call, at := scan.skip_space(at)):
            opening = self._parameter.match(scan.text, at)
            if opening is None:
                seen = scan.text[at : at + 20]
                expected = f"expected a parameter or {self.end_call}: {seen!r}"
                unclosed = f"the call is not closed by {self.end_call}"
                raise FaultyCall(expected if seen else unclosed, at, is_open=False)
            name, body = opening[1].strip(), opening.end()
            if name in arguments:
                raise FaultyCall(f"the parameter {name!r} is given twice", body)
            stop = self._find_end_of_value(scan, name, body, types)
            arguments[name] = types.convert(name, self.trim(scan.text[body:stop]))
            at = stop + len(self.end_parameter)
        return arguments, at + len(self.end_call)

    def _find_end_of_value(self, scan: TurnScan, name: str, body: int, types: ArgumentTypes) -> int:
        """Where the value that begins at `body` ends, which may hold tags."""
        first_tag = scan.find("<", body)
        is_closed = scan.text.startswith(self.end_parameter, first_tag)
        if is_closed and not types.may_be_text(name):
            return first_tag
        nesting = scan.nesting(self.nested)
        end = nesting.find_end(body)
        if end is None:
            what = "call" if is_closed else f"parameter {name!r}"
            tag = self.end_call if is_closed else self.end_parameter
            raise FaultyCall(f"the {what} is not closed by {tag}", body)
        first = nesting.find_before(body) + 1
        depth = nesting.depths[first - 1]
        while nesting.depths[first] >= depth:
            if nesting.kinds[first] == "splits" and nesting.depths[first] == depth:
                start, _ = nesting.spans[first]
                at = scan.skip_space(start + len(self.end_parameter))
                following = self._parameter.match(scan.text, at)
                if following is not None and types.declares(following[1].strip()):
                    return start
            first += 1
        if any(kind != "closes" for kind in nesting.kinds[first:end]):
            reason = f"{self.end_call} stands in the parameter {name!r}, or several calls are mixed"
            raise FaultyCall(reason, body)
        return nesting.spans[end][0]


@register_tool_parser("qwen3_coder")
class Qwen3CoderParser(MarkupParser):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``."""

    stop_tokens = ("<|im_end|>",)
    block = ("<tool_call>", "</tool_call>")
    call = r"<function=(?P<name>[^<>\n]*)>"
    example = "<function=NAME>"
    end_call = "</function>"
    parameter = r"<parameter=([^<>\n]+)>"
    end_parameter = "</parameter>"

    @staticmethod
    def trim(value: str) -> str:
        """`value` without the line break that opens it and the one that closes it."""
        return value.removeprefix("\n").removesuffix("\n")


@register_tool_parser("seed_oss")
class SeedOssParser(Qwen3CoderParser):
    """As Qwen3-Coder, with tags of its own around calls and reasoning."""

    stop_tokens = ("<seed:eos>",)
    reasoning_tags = (("<seed:think>", "</seed:think>"), ("<think>", "</think>"))
    block = ("<seed:tool_call>", "</seed:tool_call>")


@register_tool_parser("minimax_m2")
class MiniMaxM2Parser(MarkupParser):
    """MiniMax M2: ``<minimax:tool_call><invoke name="f"><parameter name="x">1</parameter>…``."""

    stop_tokens = ("[e~[",)
    block = ("<minimax:tool_call>", "</minimax:tool_call>")
    needs_block = True
    call = r"<invoke name=[\"']?(?P<name>[^\"'<>\n]*)[\"']?>"
    example = '<invoke name="NAME">'
    end_call = "</invoke>"
    parameter = r"<parameter name=[\"']?([^\"'<>\n]+)[\"']?>"
    end_parameter = "</parameter>"


@register_tool_parser("glm4")
class Glm4Parser(MarkupParser):
    """GLM-4.5 and later: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…``.

    With and without line breaks between the tags (4.5 and 4.6 write them, 4.7 does not). A value
    whose parameter has no type in the schema is read as JSON where it is JSON other than a string,
    as the model's own template writes it.
    """

    stop_tokens = ("<|user|>", "<|observation|>", "<|endoftext|>")
    call = r"<tool_call>(?P<name>[^<]*+)"
    example = "the name of a function"
    end_call = "</tool_call>"
    parameter = r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>"
    end_parameter = "</arg_value>"
    untyped_as_json = True
    name = re.compile(r"\s*(?!\.\.\.|…)[^\s{}\"']+\s*")

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        name, stop = opening["name"], opening.end()
        if scan.is_meant(opening.start("name"), self.end_call):
            return True
        if self.name.fullmatch(name) is None:
            return scan.nesting(self.nested).find_end(stop) is not None
        if scan.text.startswith(self.end_call, stop):
            return name.strip() in scan.tool_names or not scan.tool_names
        is_before_call = scan.text.startswith("<tool_call>", stop) and scan.is_at_line_start
        return is_before_call or scan.text.startswith("<arg_key>", stop)
