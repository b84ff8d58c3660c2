"""Formats whose calls are JSON: Hermes, Mistral, Llama 3, DeepSeek, Kimi."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any, ClassVar

from rollout.chat.parsers.json_calls import (
    GAP,
    FaultyCall,
    find_last_calls,
    read_arguments,
    read_call_object,
    read_json,
)
from rollout.chat.parsers.pythonic import read_keywords
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser, TurnScan


@register_tool_parser("hermes")
class HermesParser(TaggedParser):
    """Hermes, also Qwen: ``<tool_call>{"name": …, "arguments": …}</tool_call>``.

    A call ends at the ``</tool_call>`` after its JSON, so that arguments may contain tags.
    """

    stop_tokens = ("<|im_end|>",)
    opening, _end = "<tool_call>", "</tool_call>"
    nested = re.compile(rf"(?P<opens>{opening}{GAP}[{{\[])|(?P<closes>{_end})")

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        is_twice = scan.text.startswith(opening[0], opening.end()) and scan.is_at_line_start
        return is_twice or scan.is_meant(opening.end(), self._end)

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        value, stop = read_json_before(scan, opening.end(), self._end)
        name, arguments, _ = read_call_object(value)
        return scan.add_call(opening.start(), stop, name, arguments)


def read_json_before(scan: TurnScan, at: int, end: str) -> tuple[Any, int]:
    """The JSON value that stands at `at` before an end tag, and the position after that tag.

    The fence that DeepSeek closes after it may stand between them.

    Raises:
        FaultyCall: Something else stands there.
    """
    text = scan.text
    value, stop = read_json(text, scan.skip_space(at))
    stop = scan.skip_space(scan.skip_tag("```", stop))
    if not text.startswith(end, stop):
        raise FaultyCall(f"the call is not closed by {end}", stop, is_open=False)
    return value, stop + len(end)


_MARK = r"\[TOOL_CALLS\]"
_NAME = r"(?P<name>[^\[\]{}\n]*)(?:\[CALL_ID\](?P<id>[^\[\]{}\n]*))?\[ARGS\]"
_NAMED = re.compile(_NAME)
_NEXT_MARK = re.compile(rf"{_MARK}\s*+(?:{_NAME}\s*+)?")


@register_tool_parser("mistral")
class MistralParser(TaggedParser):
    """Mistral: ``[TOOL_CALLS]`` and an array of calls, or ``[TOOL_CALLS]name[ARGS]{…}`` each.

    Tokenizers up to v7 write an array, later ones a name, perhaps an id, and arguments. What is
    malformed reaches to the next ``[TOOL_CALLS]`` or to the end; calls of an array that stand
    before the fault count.
    """

    stop_tokens = ("</s>",)
    reasoning_tags = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
    opening = _MARK
    #: What calls begin with: an array, or a name and arguments.
    _begun = re.compile(r"\s*(?:\[\s*(?:[{\]\"]|\Z)|\{|[^\[\]{}\n]*\[(?:ARGS|CALL_ID)\])")

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        return scan.is_empty or self._begun.match(scan.text, opening.end()) is not None

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        at = scan.skip_space(opening.end())
        named = _NAMED.match(scan.text, at)
        if named is None and scan.text.startswith("[", at):
            return self._read_array(scan, opening, at + 1)
        if named is None or not named["name"].strip():
            raise FaultyCall("expected an array of calls, or NAME[ARGS] and JSON")
        value, stop = read_json(scan.text, scan.skip_space(named.end()))
        name, arguments = named["name"].strip(), read_arguments(value)
        return scan.add_call(opening.start(), stop, name, arguments, named["id"])

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        return find_last_calls(scan.text, opening.end(), _NEXT_MARK)

    def _read_array(self, scan: TurnScan, opening: re.Match[str], at: int) -> int:
        start, at, end = opening.start(), scan.skip_space(at), len(scan.text)
        if scan.text.startswith("]", at):
            return scan.add_invalid(start, at + 1, "the array holds no call")
        try:
            while at < end and not scan.text.startswith("]", at):
                value, stop = read_json(scan.text, at)
                scan.add_json_call(start, stop, value)
                start = follower = scan.skip_space(stop)
                if follower < end and scan.text[follower] not in ",]":
                    raise FaultyCall("expected , or ] after a call", follower)
                start = at = scan.skip_space(follower + scan.text.startswith(",", follower))
        except FaultyCall as fault:
            stop = find_last_calls(scan.text, fault.at, _NEXT_MARK)
            return scan.add_invalid(start, stop, str(fault))
        return at + 1


#: How an object in JSON begins, and one that was meant as a call.
OBJECT = r"\{\s*[\"}]"
_CALL_OBJECT = r"\{\s*\"(?:name|type|function)\"\s*:"
_TAG = r"<\|python_tag\|>"
_MEANT_OBJECT = re.compile(_CALL_OBJECT)
_NEXT_OBJECT = re.compile(rf"(?:;\s*(?:{_TAG}\s*)?|{_TAG}\s*)(?={_CALL_OBJECT})")


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
        rf"(?P<tag>{_TAG})|<function=(?P<function>[^<>\n]*)>"
        rf"|(?:\A|(?<=</think>))\s*(?={OBJECT})"
    )
    nested = re.compile(rf"(?P<opens><function=[^<>\n]*>{GAP}\{{)|(?P<closes></function>)")
    _begun = re.compile(r"\s*\{|\w")
    _argument = re.compile(r'\s*"?\s*[{\[]')
    _built_in = re.compile(r"\s*([A-Za-z_]\w*)\.call(?=\()")

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        begun = self._begun if opening["function"] is None else self._argument
        return begun.match(scan.text, opening.end()) is not None

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        start, at = opening.start(), scan.skip_space(opening.end())
        if opening["function"] is not None:
            return self._read_function(scan, start, at, opening["function"].strip())
        if scan.text.startswith("{", at):
            is_marked = opening["tag"] is not None
            return read_objects(scan, start if is_marked else at, at, is_marked=is_marked)
        call = self._built_in.match(scan.text, at)
        if call is None:
            raise FaultyCall("expected a JSON call or NAME.call(…) after <|python_tag|>")
        arguments, stop = read_keywords(scan.text, call.end())
        return scan.add_call(start, stop, call[1], arguments)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        if opening["function"] is not None:
            return super().find_end(scan, opening, fault)
        # Another tag after code that opened a string may be quoted in it.
        is_code = self._built_in.match(scan.text, opening.end()) is not None
        return len(scan.text) if is_code else scan.find(opening[0], opening.end())

    def _read_function(self, scan: TurnScan, start: int, at: int, name: str) -> int:
        if not name:
            raise FaultyCall("expected <function=NAME>")
        value, stop = read_json_before(scan, at, "</function>")
        return scan.add_call(start, stop, name, read_arguments(value))


def read_objects(scan: TurnScan, start: int, at: int, *, is_marked: bool) -> int:
    """Add the JSON calls that begin at `at`, separated by ``;``; return the position after them.

    Args:
        scan: What to add to.
        start: Where the text of the first call begins, its mark included.
        at: Where its JSON begins.
        is_marked: Whether a mark says that calls follow; else one without arguments is content.
    """
    keys = ("parameters", "arguments")
    while True:
        try:
            value, stop = read_json(scan.text, at)
        except FaultyCall as error:
            if not is_marked and _MEANT_OBJECT.match(scan.text, at) is None:
                return scan.add_content(start, at + 1)
            stop = len(scan.text)
            if not error.is_cut:
                stop = find_last_calls(scan.text, at + 1, _NEXT_OBJECT)
            scan.add_invalid(start, stop, str(error))
        else:
            is_call = isinstance(value, dict) and any(key in value for key in keys)
            if not is_marked and not (is_call and "name" in value):
                return scan.add_content(start, stop)
            scan.add_json_call(start, stop, value, *keys)
        start = at = scan.skip_space(scan.skip_tag(";", stop))
        is_marked = True
        if not scan.text.startswith("{", at):
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
    """

    section: ClassVar[tuple[str, str]]
    call: ClassVar[str]
    end_call: ClassVar[str]
    separator: ClassVar[str]
    _begun: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        cls.opening = "|".join(map(re.escape, (*cls.section, cls.call, cls.end_call)))
        head = rf"{re.escape(cls.call)}[^<]{{0,300}}{re.escape(cls.separator)}"
        cls._begun = re.compile(rf"{head}\s*(?:[{{\[\"]|\w[^\s<]*\s*\n)")
        cls.nested = re.compile(rf"(?P<opens>{head})|(?P<closes>{re.escape(cls.end_call)})")
        super().__init_subclass__()

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        _, end = self.section
        if opening[0] in (end, self.end_call):
            return scan.follows_call(opening.start())
        if opening[0] == self.call:
            if self._begun.match(scan.text, opening.start()) is not None:
                return True
            return scan.follows_call(opening.start()) and not scan.has_ended(end)
        at = scan.skip_space(opening.end())
        if scan.text.startswith(self.call, at):
            gap = scan.text[opening.end() : at]
            is_begun = self._begun.match(scan.text, at) is not None
            return is_begun or "\n" in gap or not gap or scan.is_at_line_start
        return scan.is_meant(opening.end(), end)

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        begin, end = self.section
        if opening[0] == self.call:
            return self._read_one(scan, opening)
        at = scan.skip_space(opening.end())
        if opening[0] != begin or scan.text.startswith(self.call, at):
            return scan.end_call(opening.end())
        stop, seen = scan.find(end, at), scan.text[at : at + 20]
        if stop == at:
            return scan.add_invalid(opening.start(), at, f"no call stands before {end}")
        return scan.add_invalid(at, stop, f"expected a call in the section: {seen!r}")

    def _read_one(self, scan: TurnScan, opening: re.Match[str]) -> int:
        tag = self._tag.search(scan.text, opening.end())
        limit = len(scan.text) if tag is None else tag.start()
        split = scan.text.find(self.separator, opening.end(), limit)
        if split < 0:
            raise FaultyCall(f"expected {self.separator} in the call", limit, is_open=False)
        head = scan.text[opening.end() : split].strip()
        name, call_id, body = self.read_head(scan, head, split + len(self.separator))
        value, stop = read_json_before(scan, body, self.end_call)
        return scan.add_call(opening.start(), stop, name, read_arguments(value), call_id)

    @abstractmethod
    def read_head(self, scan: TurnScan, head: str, body: int) -> tuple[str, str | None, int]:
        """The name of the function, the model's own id of the call, and where the JSON is.

        Raises:
            FaultyCall: The head names no function.
        """


@register_tool_parser("deepseek_v3")
class DeepSeekV3Parser(SectionParser):
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
class KimiK2Parser(SectionParser):
    """Kimi K2; a call's id, ``functions.NAME:INDEX``, names the function and stays."""

    stop_tokens = ("<|im_end|>",)
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = "<|tool_call_begin|>"
    end_call = "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"

    def read_head(self, scan: TurnScan, head: str, body: int) -> tuple[str, str | None, int]:
        name = head.partition(":")[0].removeprefix("functions.")
        if not name or name.isdigit() or any(sign.isspace() for sign in head):
            raise FaultyCall(f"expected functions.NAME:INDEX, not {head[:40]!r}", body)
        return name, head, body
