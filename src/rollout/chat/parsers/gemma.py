"""Gemma: ``<|tool_call>call:f{x:1}<tool_call|>`` and the ways of earlier versions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NoReturn

from rollout.chat.parsers.json_calls import finite
from rollout.chat.parsers.literals import MAX_DEPTH, LiteralFault, PythonCall, PythonReader
from rollout.chat.parsers.llama3 import read_objects
from rollout.chat.parsers.pythonic import CALL_LIST, read_call_list
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import TaggedParser

if TYPE_CHECKING:
    from rollout.chat.parsers.scan import TurnScan

FENCE = "```"
_ENDS = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}
_TAG = re.compile(r"<\|tool_call>|<start_function_call>|<tool_call\|>|<end_function_call>")

_GAP = re.compile(r"\s*")
_HEAD = re.compile(r"\s*call:\s*([\w.\-]+)\s*(?=\{)")
_STRING = re.compile(r'<\|"\|>(.*?)<\|"\|>|<escape>(.*?)<escape>|"([^"\\]*)"', re.DOTALL)
_BARE = re.compile(r"[^,{}\[\]<]*[^,{}\[\]<\s]")
_KEY = re.compile(r"([^,:{}\[\]<]+):")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_CONSTANTS = {"true": True, "false": False, "null": None}


@register_tool_parser("gemma")
class GemmaParser(TaggedParser):
    r"""Reads the formats of Gemma 4, of FunctionGemma and of prompted Gemma 3.

    ``<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>``; the same between
    ``<start_function_call>`` and ``<end_function_call>`` with ``<escape>`` around strings;
    Python calls in a fence of ``tool_code``; ``[f(x=1)]`` or ``{"name": …, "parameters": {…}}``
    as the start of the turn.
    """

    stop_tokens = ("<end_of_turn>", "<turn|>", "<|tool_response>", "<start_function_response>")
    reasoning_tags = (("<|channel>thought", "<channel|>"), ("<think>", "</think>"))
    opening = (
        r"<\|tool_call>|<start_function_call>|(?P<fence>```tool_code\b)"
        rf"|(?:\A|(?<=<channel\|>)|(?<=</think>))\s*(?:(?P<json>(?=\{{))|{CALL_LIST})"
    )

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        if opening["name"] is not None:
            return read_call_list(scan, opening)
        if opening["json"] is not None:
            return read_objects(scan, opening.end(), opening.end(), is_marked=False)
        if opening["fence"] is not None:
            return _read_fence(scan, opening)
        return _read_tagged(scan, opening)


def _read_tagged(scan: TurnScan, opening: re.Match[str]) -> int:
    start, end = opening.start(), _ENDS[opening[0]]
    reader = GemmaReader(scan.text, opening.end())
    try:
        name, arguments = reader.call()
        if not reader.take(end):
            reader.fail(f"the call is not closed by {end}")
    except LiteralFault as fault:
        tag = _TAG.search(scan.text, fault.at)
        if tag is None:
            return scan.add_invalid(start, len(scan.text), str(fault))
        stop = tag.end() if tag[0] == end else tag.start()
        return scan.add_invalid(start, stop, str(fault))
    return scan.add_call(start, reader.at, name, arguments)


def _read_fence(scan: TurnScan, opening: re.Match[str]) -> int:
    """The calls of a fence, one or several, bare, printed or in a list."""
    reader = PythonReader(scan.text, opening.end())
    calls: list[PythonCall] = []
    try:
        while not calls or not reader.take(FENCE):
            calls += reader.statement()
    except LiteralFault as fault:
        end = scan.find(FENCE, fault.at)
        stop = min(end + len(FENCE), len(scan.text))
        return scan.add_invalid(opening.start(), stop, str(fault))
    for call in calls:
        scan.add_call(call.start, call.stop, call.name, call.arguments)
    return reader.at


class GemmaReader:
    """Reads ``call:f{…}`` forward from `at`; every method leaves `at` behind what it read.

    Raises:
        LiteralFault: From all methods, with the position of the fault.
    """

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def call(self) -> tuple[str, dict[str, Any]]:
        """The name of the function and its arguments."""
        head = _HEAD.match(self.text, self.at)
        if head is None:
            self.fail("expected call:NAME{")
        self.at = head.end() + 1
        return head[1], self._object(0)

    def take(self, sign: str) -> bool:
        """Whether `sign` stands next, white space aside; if so go past it."""
        gap = _GAP.match(self.text, self.at)
        self.at = self.at if gap is None else gap.end()
        found = self.text.startswith(sign, self.at)
        if found:
            self.at += len(sign)
        return found

    def fail(self, reason: str) -> NoReturn:
        """Raise a fault here, with what stands here."""
        seen = self.text[self.at : self.at + 20]
        raise LiteralFault(f"{reason}: {seen!r}" if seen else f"{reason}: the text ends", self.at)

    def _object(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not self.take("}"):
            key = self._key()
            items[key] = self._value(depth + 1)
            if not self.take(",") and not self.text.startswith("}", self.at):
                self.fail("expected , or }")
        return items

    def _list(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self.take("]"):
            items.append(self._value(depth + 1))
            if not self.take(",") and not self.text.startswith("]", self.at):
                self.fail("expected , or ]")
        return items

    def _key(self) -> str:
        written = _STRING.match(self.text, self.at)
        if written is not None:
            self.at = written.end()
            if not self.take(":"):
                self.fail("expected : after a key")
            return _first(written)
        key = _KEY.match(self.text, self.at)
        if key is None:
            self.fail("expected key:value")
        self.at = key.end()
        return key[1].strip()

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self.fail("nested too deeply")
        if self.take("{"):
            return self._object(depth)
        if self.take("["):
            return self._list(depth)
        written = _STRING.match(self.text, self.at) or _BARE.match(self.text, self.at)
        if written is None:
            self.fail("expected a value")
        self.at = written.end()
        return _bare(written[0].strip()) if written.re is _BARE else _first(written)


def _first(written: re.Match[str]) -> str:
    return next(body for body in written.groups() if body is not None)


def _bare(word: str) -> Any:
    """A constant, a number, or else the word itself, as models at times forget the marks."""
    try:
        if _INTEGER.fullmatch(word) is not None:
            return int(word)
        if _NUMBER.fullmatch(word) is not None:
            return finite(word)
    except ValueError:
        return word
    return _CONSTANTS.get(word, word)
