"""Gemma: ``<|tool_call>call:f{x:1}<tool_call|>`` and the ways of earlier versions."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from rollout.chat.parsers.json_calls import MAX_DEPTH, FaultyCall, read_number, skip_space
from rollout.chat.parsers.json_formats import OBJECT, read_objects
from rollout.chat.parsers.pythonic import (
    CALL_LIST,
    MAX_VALUES,
    STRING,
    PythonCall,
    add_call_list,
    make_fault,
    read_statement,
    unescape,
)
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser, TurnScan

_FENCE = "```"
_LINE_END = re.compile(r"[ \t]*\n")
#: What opens and closes calls.
_ENDS = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}
_NESTED = {
    opening: re.compile(rf"(?P<opens>{re.escape(opening)}\s*call:)|(?P<closes>{re.escape(end)})")
    for opening, end in _ENDS.items()
}
_NESTED_FENCE = re.compile(r"(?P<opens>```tool_code\b)|(?P<closes>```)")

_HEAD = re.compile(r"\s*call:\s*([\w.\-]+)\s*\{")
_MARKED = re.compile(r'\s*(?:<\|"\|>(.*?)<\|"\|>|<escape>(.*?)<escape>)', re.DOTALL)
_QUOTED = re.compile(rf"\s*(?P<bad>[bBfF]?){STRING}".replace(r"\\\n]", r"\\]"), re.DOTALL)
_BARE_KEY = re.compile(r"""\s*([^,:{}\[\]<"'\s][^,:{}\[\]<"]*)""")
_BARE = re.compile(r"""\s*([^,{}\[\]<"'\s](?:[^,{}\[\]<]*[^,{}\[\]<\s])?)(?P<goes_on>\s*,)?""")
#: What a bare word may hold beside quotes that it leaves open; "it's" and "dogs'" open none.
_CLOSED = re.compile(r"""[^"']++|"[^"]*"|(?<!\w)'[^']*'|(?<=\w)'""")
_CONSTANTS = {
    "true": True, "false": False, "null": None, "True": True, "False": False, "None": None
}  # fmt: skip


@register_tool_parser("gemma")
class GemmaParser(TaggedParser):
    r"""Reads the formats of Gemma 4, of FunctionGemma and of prompted Gemma 3.

    ``<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>``; the same between
    ``<start_function_call>`` and ``<end_function_call>`` with ``<escape>`` around strings; in
    both, strings in the quotes of JSON and Python;
    Python calls in a fence of ``tool_code``; ``[f(x=1)]`` or ``{"name": …, "parameters": {…}}``
    as the start of the turn.
    """

    stop_tokens = ("<end_of_turn>", "<turn|>", "<|tool_response>", "<start_function_response>")
    reasoning_tags = (("<|channel>thought", "<channel|>"), ("<think>", "</think>"))
    opening = (
        r"<\|tool_call>|<start_function_call>|(?P<fence>```tool_code\b)"
        rf"|(?:\A|(?<=<channel\|>)|(?<=</think>))\s*(?:(?P<json>(?={OBJECT}))|{CALL_LIST})"
    )

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        if opening["fence"] is not None:
            is_line = _LINE_END.match(scan.text, opening.end()) is not None
            return is_line or scan.is_at_line_start
        if opening[0] not in _ENDS:
            return True
        is_begun = scan.text.startswith("call:", scan.skip_space(opening.end()))
        return is_begun or scan.is_meant(opening.end(), _ENDS[opening[0]])

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        if opening["name"] is not None:
            return add_call_list(scan, opening)
        if opening["json"] is not None:
            return read_objects(scan, opening.end(), opening.end(), is_marked=False)
        if opening["fence"] is not None:
            return _read_fence(scan, opening.end())
        reader, end = GemmaReader(scan.text, opening.end()), _ENDS[opening[0]]
        name, arguments = reader.read_call()
        if not reader.take(end):
            fault = make_fault(f"the call is not closed by {end}", scan.text, reader.at)
            fault.is_open = not scan.text.startswith(opening[0], reader.at)
            raise fault
        return scan.add_call(opening.start(), reader.at, name, arguments)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        if opening[0] not in _ENDS and opening["fence"] is None:
            return len(scan.text)
        if not fault.is_open:
            return fault.at
        stop = scan.nesting(_NESTED.get(opening[0], _NESTED_FENCE)).find_stop(opening.end())
        return len(scan.text) if stop is None else stop


def _read_fence(scan: TurnScan, at: int) -> int:
    """The calls of a fence, one or several, bare, printed or in a list."""
    calls: list[PythonCall] = []
    while not calls or not scan.text.startswith(_FENCE, at := scan.skip_space(at)):
        more, at = read_statement(scan.text, at)
        calls += more
    for call in calls:
        scan.add_call(call.start, call.stop, call.name, call.arguments)
    return at + len(_FENCE)


class GemmaReader:
    """A position in a text from which ``call:f{key:value}`` is read; it then stands after that.

    Raises:
        FaultyCall: From all that reads, with the position of the fault.
    """

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at
        self._values = 0

    def take(self, sign: str) -> bool:
        """Whether `sign` stands next, white space aside; if so go past it."""
        self.at = skip_space(self.text, self.at)
        if not self.text.startswith(sign, self.at):
            return False
        self.at += len(sign)
        return True

    def read_call(self) -> tuple[str, dict[str, Any]]:
        """The name of the function and its arguments."""
        head = _HEAD.match(self.text, self.at)
        if head is None:
            self._fail("expected call:NAME{")
        self.at = head.end()
        return head[1], dict(self._read_items("}", 0))

    def _fail(self, reason: str) -> NoReturn:
        raise make_fault(reason, self.text, self.at)

    def _read_items(self, end: str, depth: int) -> list[tuple[str, Any]]:
        """Values up to `end`, each with its key where they are those of an object."""
        items: list[tuple[str, Any]] = []
        while not self.take(end):
            if items and not self.take(","):
                self._fail(f"expected , or {end}")
            if items and self.take(end):
                break
            key = self._read_key() if end == "}" else ""
            items.append((key, self._read_value(depth + 1)))
        return items

    def _read_key(self) -> str:
        key = self._read_string()
        if key is None:
            word = _BARE_KEY.match(self.text, self.at)
            if word is None:
                self._fail("expected key:value")
            self.at = word.end()
            key = word[1].strip()
        if not self.take(":"):
            self._fail("expected : after a key")
        return key

    def _read_value(self, depth: int) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            self._fail(f"more than {MAX_VALUES:,} values in a call")
        string = self._read_string()
        if string is not None:
            return string
        word = _BARE.match(self.text, self.at)
        if word is not None:
            if word["goes_on"] is not None and _is_open(word[1]):
                self._fail("expected the end of a quote or parenthesis before the comma")
            self.at = word.end(1)
            return _read_bare(word[1])
        if depth > MAX_DEPTH:
            self._fail("nested too deeply")
        if self.take("{"):
            return dict(self._read_items("}", depth))
        if not self.take("["):
            self._fail("expected a value")
        return [value for _, value in self._read_items("]", depth)]

    def _read_string(self) -> str | None:
        """The string that stands next, in whichever quotes; None where something else does."""
        string = _MARKED.match(self.text, self.at)
        if string is not None:
            self.at = string.end()
            return string[string.lastindex or 0]
        string = _QUOTED.match(self.text, self.at)
        if string is None:
            return None
        if string["bad"]:
            self._fail("bytes and formatted strings are no values")
        self.at = string.end()
        body = string[string.lastindex or 0]
        if string[2] in ("r", "R"):
            return body
        return _read_json_string(body) if string[5] is not None else unescape(body)


def _read_json_string(body: str) -> str:
    """What stands between double quotes in JSON, or else, by its escapes, in Python."""
    if "\\" not in body:
        return body
    try:
        return str(json.loads(f'"{body}"', strict=False))
    except ValueError:
        return unescape(body)


def _is_open(word: str) -> bool:
    """Whether a quote or a parenthesis of a bare word is not closed in it."""
    return word.count("(") > word.count(")") or _CLOSED.sub("", word) != ""


def _read_bare(word: str) -> Any:
    """A constant, a number, or else the word itself, as models at times forget the marks."""
    try:
        return read_number(word)
    except ValueError:
        return _CONSTANTS.get(word, word)
