"""Formats whose calls are JSON: Hermes, Mistral, Llama 3, DeepSeek, Kimi."""

from __future__ import annotations

import re
from typing import ClassVar

from rollout.chat.parsers.json_calls import GAP, FaultyCall, read_arguments, read_json
from rollout.chat.parsers.pythonic import read_keywords
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser, TurnScan


def add_json_before(
    scan: TurnScan, start: int, at: int, end: str, name: str = "", call_id: str | None = None
) -> int:
    """Add the call from `start` whose JSON begins at `at`; return the position after its end tag.

    The JSON is arguments where there is a `name`, else a call. The fence that DeepSeek closes after
    it may stand before the end tag.

    Raises:
        FaultyCall: Something else than JSON and the end tag stands there.
    """
    value, stop = read_json(scan.text, scan.skip_space(at))
    stop = scan.skip_space(scan.skip_tag("```", stop))
    if not scan.text.startswith(end, stop):
        raise FaultyCall(f"the call is not closed by {end}", stop, is_open=False)
    return scan.add_json_call(start, stop + len(end), value, name=name, call_id=call_id)


@register_tool_parser("hermes")
class HermesParser(TaggedParser):
    """Hermes, also Qwen: ``<tool_call>{"name": …, "arguments": …}</tool_call>``.

    A call ends at the ``</tool_call>`` after its JSON, so that arguments may contain tags.
    """

    stop_tokens = ("<|im_end|>",)
    opening, _end = "<tool_call>", "</tool_call>"
    nested = re.compile(rf"(?P<opens>{opening}{GAP}[{{\[])|(?P<closes>{_end})")

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        return scan.is_meant(opening.end(), self._end)

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        return add_json_before(scan, *opening.span(), self._end)


@register_tool_parser("mistral")
class MistralParser(TaggedParser):
    """Mistral: ``[TOOL_CALLS]`` and an array of calls, or ``[TOOL_CALLS]name[ARGS]{…}`` each.

    Tokenizers up to v7 write an array, later ones a name, perhaps an id, and arguments. JSON that
    is malformed reaches to the end of the turn; calls before it count.
    """

    stop_tokens = ("</s>",)
    reasoning_tags = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
    opening = (
        r"\[TOOL_CALLS\](?:\s*+(?P<name>[^\[\]{}\n]*+)"
        r"(?:\[CALL_ID\](?P<id>[^\[\]{}\n]*+))?\[ARGS\])?"
    )
    _begun = re.compile(r"\s*+(?:\[\s*+(?:[{\]\"]|\Z)|\{)")

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        is_begun = self._begun.match(scan.text, opening.end()) is not None
        return is_begun or opening["name"] is not None or scan.is_empty

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        name, at = (opening["name"] or "").strip(), scan.skip_space(opening.end())
        if opening["name"] is None and scan.text.startswith("[", at):
            return self._read_array(scan, opening.start(), scan.skip_space(at + 1))
        if not name:
            raise FaultyCall("expected an array of calls, or NAME[ARGS] and JSON")
        value, stop = read_json(scan.text, at)
        arguments = read_arguments(value)  # a string of faulty JSON may have ended within
        return scan.add_call(opening.start(), stop, name, arguments, opening["id"])

    def _read_array(self, scan: TurnScan, start: int, at: int) -> int:
        end = len(scan.text)
        if scan.text.startswith("]", at):
            return scan.add_invalid(start, at + 1, "the array holds no call")
        while at < end and not scan.text.startswith("]", at):
            try:
                value, stop = read_json(scan.text, at)
            except FaultyCall as fault:
                return scan.add_invalid(start, end, str(fault))
            scan.add_json_call(start, stop, value)
            start = at = scan.skip_space(stop)
            if scan.text.startswith(",", at):
                start = at = scan.skip_space(at + 1)
            elif at < end and not scan.text.startswith("]", at):
                return scan.add_invalid(at, end, "expected , or ] after a call")
        return at + 1


#: How an object in JSON begins, and one that was meant as a call.
OBJECT = r"\{\s*[\"}]"
_MEANT_OBJECT = re.compile(r"\{\s*\"(?:name|type|function|parameters|arguments|id)\"\s*:")


@register_tool_parser("llama3")
class Llama3Parser(TaggedParser):
    """Reads the three ways in which Llama 3.x calls.

    ``{"name": …, "parameters": {…}}``, several separated by ``;``, after ``<|python_tag|>`` or as
    the start of the turn; ``<|python_tag|>NAME.call(key="value")`` of the built-in tools;
    ``<function=NAME>{…}</function>``. Other code after ``<|python_tag|>`` is an invalid call. An
    object at the start that is no call is content.
    """

    stop_tokens = ("<|eot_id|>", "<|eom_id|>")
    opening = (
        r"(?P<tag><\|python_tag\|>)|<function=(?P<function>[^<>\n]*)>"
        rf"|(?:\A|(?<=</think>))\s*(?={OBJECT})"
    )
    nested = re.compile(rf"(?P<opens><function=[^<>\n]*>{GAP}\{{)|(?P<closes></function>)")
    _begun = re.compile(r"\s*\{|\w")
    _argument = re.compile(r'\s*+(?:"\s*+)?[{\[]')
    _built_in = re.compile(r"\s*([A-Za-z_]\w*)\.call(?=\()")

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        begun = self._begun if opening["function"] is None else self._argument
        return begun.match(scan.text, opening.end()) is not None

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        start, at = opening.start(), scan.skip_space(opening.end())
        if opening["function"] is not None:
            name = opening["function"].strip()
            if not name:
                raise FaultyCall("expected <function=NAME>")
            return add_json_before(scan, start, at, "</function>", name)
        if scan.text.startswith("{", at):
            is_marked = opening["tag"] is not None
            return read_objects(scan, start if is_marked else at, at, is_marked=is_marked)
        call = self._built_in.match(scan.text, at)
        if call is None:
            raise FaultyCall("expected a JSON call or NAME.call(…) after <|python_tag|>")
        arguments, stop = read_keywords(scan.text, call.end())
        return scan.add_call(start, stop, call[1], arguments)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        is_tagged = opening["function"] is not None
        return super().find_end(scan, opening, fault) if is_tagged else len(scan.text)


def read_objects(scan: TurnScan, start: int, at: int, *, is_marked: bool) -> int:
    """Add the JSON calls that begin at `at`, separated by ``;``; return the position after them.

    The text of the first begins at `start`, its mark included. Where nothing marks it as a call, an
    object without a name and arguments is content.
    """
    keys = ("parameters", "arguments")
    while scan.text.startswith("{", at):
        try:
            value, stop = read_json(scan.text, at)
        except FaultyCall as fault:
            if is_marked or _MEANT_OBJECT.match(scan.text, at) is not None:
                return scan.add_invalid(start, len(scan.text), str(fault))
            return scan.add_content(start, len(scan.text))  # a string of it may quote calls
        if not is_marked and not ("name" in value and any(key in value for key in keys)):
            return scan.add_content(start, stop)
        scan.add_json_call(start, stop, value, *keys)
        start = at = scan.skip_space(scan.skip_tag(";", stop))
        is_marked = True
    return at


class SectionParser(TaggedParser):
    """Calls are a tag, a head that names the function, a separator, JSON and an end tag.

    The tags of the section around all calls may be missing, those of a call may not; one that is
    faulty leaves the others alone. A tag that no call follows is content; an end tag right after a
    call is nothing.

    Attributes:
        section: What opens and closes a section.
        call, end_call: What opens and closes a call.
        separator: What stands between the head and the arguments.
        head: Regular expression of the head, the separator and a fence around the JSON; the groups
            ``name``, or ``fenced``, and ``id``, the model's own, tell of the call.
        example: A head, for the reason of an invalid call.
    """

    section: ClassVar[tuple[str, str]]
    call: ClassVar[str]
    end_call: ClassVar[str]
    separator: ClassVar[str]
    head: ClassVar[str]
    example: ClassVar[str]
    _head: ClassVar[re.Pattern[str]]
    _begun: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        cls.opening = "|".join(map(re.escape, (*cls.section, cls.call, cls.end_call)))
        cls._head = re.compile(cls.head)
        head = rf"{re.escape(cls.call)}[^<]{{0,300}}{re.escape(cls.separator)}"
        cls._begun = re.compile(rf"{head}\s*(?:[{{\[\"]|\w[^\s<]*\s*\n)")
        cls.nested = re.compile(rf"(?P<opens>{head})|(?P<closes>{re.escape(cls.end_call)})")
        super().__init_subclass__()

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        begin, end = self.section
        if opening[0] == begin:
            return scan.text.startswith(self.call, scan.skip_space(opening.end()))
        is_after_call = scan.follows_call(opening.start())
        if opening[0] != self.call:
            return is_after_call
        is_begun = self._begun.match(scan.text, opening.start()) is not None
        return is_begun or (is_after_call and not scan.has_ended(end))

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        if opening[0] != self.call:
            return scan.end_call(opening.end())
        text, at = scan.text, scan.skip_space(opening.end())
        head = self._head.match(text, at)
        if head is None:
            tag = self._tag.search(text, at)
            limit = len(text) if tag is None else tag.start()
            is_open = text.find(self.separator, at, limit) >= 0
            raise FaultyCall(f"expected {self.example}{self.separator}", limit, is_open=is_open)
        parts = {"id": None, "fenced": None, **head.groupdict()}
        name = parts["name"] or parts["fenced"] or ""
        return add_json_before(
            scan, opening.start(), head.end(), self.end_call, name.strip(), parts["id"]
        )


@register_tool_parser("deepseek_v3")
class DeepSeekV3Parser(SectionParser):
    """DeepSeek V3 and R1 (``function``, separator, name, fenced JSON), V3.1 (name, JSON)."""

    stop_tokens = ("<｜end▁of▁sentence｜>",)
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = "<｜tool▁call▁begin｜>"
    end_call = "<｜tool▁call▁end｜>"
    separator = "<｜tool▁sep｜>"
    head = (
        rf"function\s*{separator}\s{{0,8}}(?P<fenced>[^\s`{{][^\n`<]{{0,255}})\n\s{{0,8}}```[a-z]{{0,8}}"
        rf"|(?P<name>[^\n<]{{1,300}})\s{{0,8}}{separator}"
    )
    example = "the name of a function before "


@register_tool_parser("kimi_k2")
class KimiK2Parser(SectionParser):
    """Kimi K2; a call's id, ``functions.NAME:INDEX``, names the function and stays."""

    stop_tokens = ("<|im_end|>",)
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = "<|tool_call_begin|>"
    end_call = "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"
    head = (
        r"(?P<id>(?:functions\.)?+(?P<name>(?!\d+[:\s<])[^\s<:]{1,300})(?::[^\s<]{0,300})?)"
        rf"\s{{0,8}}{re.escape(separator)}"
    )
    example = "functions.NAME:INDEX"
