"""Literals and calls in Python's syntax, read without evaluating or compiling anything.

The values are those that JSON has too: strings, numbers, True, False, None (and JSON's true,
false, null), lists, tuples as lists, dicts with string keys. Depth is bounded, time linear.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.parsers.json_calls import MAX_DEPTH, finite, value_at
from rollout.chat.parsers.reader import Reader, ReadingBudget

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_CALL = re.compile(rf"\s*({_NAME})\s*\(\s*(\))?", re.ASCII)
_PRINT = re.compile(rf"print\(\s*(?={_NAME}\s*\()", re.ASCII)
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*", re.ASCII)
_ATOM = re.compile(
    r"(?:(?P<integer>[+-]?[0-9](?:_?[0-9])*)"
    r"|(?P<number>[+-]?(?:[0-9](?:_?[0-9])*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<constant>True|False|None|true|false|null))(?![\w.])"
)
#: How a list or an object begins that may be JSON.
_JSON = re.compile(r"(?:\[\s*+)++(?:[]{\"0-9-]|true|false|null)|\{\s*[\"}]")
_STRING = re.compile(
    r"([rRuU]?)(?:"
    r'"""((?:[^"\\]++|\\.|"(?!""))*+)"""|'
    r"'''((?:[^'\\]++|\\.|'(?!''))*+)'''|"
    r'"((?:[^"\\\n]++|\\.)*+)"|'
    r"'((?:[^'\\\n]++|\\.)*+)')\s*",
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(\n|[\\'\"abfnrtv]))"
)
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False}
_ATOMS: dict[str | None, Callable[[str], int | float | bool | None]] = {
    "integer": int,
    "number": finite,
    "constant": _CONSTANTS.get,
}
_END = {"[": "]", "(": ")"}


class PythonCall(msgspec.Struct, frozen=True):
    """A call and where it stands in the text."""

    name: str
    arguments: dict[str, Any]
    start: int
    stop: int


def literal(text: str, budget: ReadingBudget | None = None) -> Any:
    """The value that the whole of `text` writes; ValueError where it is no literal."""
    reader = PythonReader(text, 0, budget)
    value = reader.value()
    if reader.skip() < len(text):
        reader.fail("more text follows the literal")
    return value


class PythonReader(Reader):
    """Reads calls whose arguments are literals, and literals."""

    def call(self) -> PythonCall:
        """A call such as ``f(x=1, y="a")``."""
        self.spend()
        head = _CALL.match(self.text, self.at)
        if head is None:
            self.skip()
            self.fail("expected a call of a function")
        self.at = head.end()
        name, end = head.groups()
        arguments = self.keywords() if end is None else {}
        return PythonCall(name, arguments, head.start(1), self.at)

    def call_list(self) -> list[PythonCall]:
        """What a list such as ``[f(x=1), g()]`` holds; at least one call."""
        if not self.take("["):
            self.fail("expected [")
        calls = [self.call()]
        while not self.ends("]"):
            calls.append(self.call())
        return calls

    def statement(self) -> list[PythonCall]:
        """The calls of one statement: a call, a list of calls, or one inside ``print(…)``."""
        if self.text.startswith("[", self.skip()):
            return self.call_list()
        printed = _PRINT.match(self.text, self.at)
        if printed is not None:
            self.at = printed.end()
        call = self.call()
        if printed is not None and not self.take(")"):
            self.fail("expected ) after print")
        self.take(";")
        return [call]

    def keywords(self) -> dict[str, Any]:
        """What stands up to ``)``; of equal names the last one counts."""
        arguments: dict[str, Any] = {}
        is_done = self.take(")")
        while not is_done:
            keyword = _KEYWORD.match(self.text, self.at)
            if keyword is None:
                self.fail("expected name=value")
            self.at = keyword.end()
            arguments[keyword[1]] = self._argument()
            is_done = self.ends(")")
        return arguments

    def _argument(self) -> Any:
        self.spend()
        atom = _ATOM.match(self.text, self.skip())
        if atom is not None:
            return self._atom(atom)
        if _JSON.match(self.text, self.at) is not None:
            # Long lists are mostly JSON as well, which is read many times faster.
            try:
                value, self.at = value_at(self.text, self.at)
            except ValueError:
                pass
            else:
                return value
        return self._composed(0)

    def value(self, depth: int = 0) -> Any:
        """One literal."""
        self.spend()
        atom = _ATOM.match(self.text, self.skip())
        if atom is not None:
            return self._atom(atom)
        return self._composed(depth)

    def _composed(self, depth: int) -> Any:
        """A list, tuple, dict or string."""
        opening = self.text[self.at : self.at + 1]
        if opening and opening in "[({":
            if depth == MAX_DEPTH:
                self.fail("nested too deeply")
            self.at += 1
            return self._dict(depth + 1) if opening == "{" else self._list(_END[opening], depth + 1)
        return self._string()

    def _list(self, end: str, depth: int) -> Any:
        items: list[Any] = []
        is_done = self.take(end)
        while not is_done:
            items.append(self.value(depth))
            if end == ")" and len(items) == 1 and self.take(end):
                return items[0]  # (1) is 1, (1,) is [1]
            is_done = self.ends(end)
        return items

    def _dict(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        is_done = self.take("}")
        while not is_done:
            self.skip()
            key = self._string()
            if not self.take(":"):
                self.fail("expected : after a key")
            items[key] = self.value(depth)
            is_done = self.ends("}")
        return items

    def _atom(self, atom: re.Match[str]) -> int | float | bool | None:
        try:
            value = _ATOMS[atom.lastgroup](atom[0])
        except ValueError:
            self.fail("expected a number within bounds")
        self.at = atom.end()
        return value

    def _string(self) -> str:
        """Strings that stand side by side are one."""
        pieces: list[str] = []
        while (written := _STRING.match(self.text, self.at)) is not None:
            prefix, body = written[1], written[written.lastindex or 0]
            pieces.append(body if prefix in ("r", "R") else unescape(body))
            self.at = written.end()
        if not pieces:
            self.fail("expected a literal")
        return "".join(pieces)


def unescape(body: str) -> str:
    """What stands between quotes in Python; escapes that it does not know stay as they are."""
    return _ESCAPE.sub(_character, body) if "\\" in body else body


def _character(escape: re.Match[str]) -> str:
    octal, *hexadecimal, sign = escape.groups()
    if sign is not None:
        return _ESCAPED.get(sign, sign)
    code = int(octal, 8) if octal else int(next(digits for digits in hexadecimal if digits), 16)
    return chr(code) if code <= 0x10FFFF else escape[0]
