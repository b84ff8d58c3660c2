"""Literals and calls in Python's syntax, read without evaluating or compiling anything.

The values are those that JSON has too: strings, numbers, True, False, None (and JSON's true,
false, null), lists, tuples as lists, dicts with string keys. Depth is bounded, time linear.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, NoReturn

from rollout.chat.parsers.json_calls import finite, value_at

#: Nesting past this is no literal of a sane call; it also bounds Python's own stack.
MAX_DEPTH = 100

_GAP = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_PRINT = re.compile(r"print\(\s*(?=[A-Za-z_][\w.]*\s*\()")
_NUMBER = re.compile(
    r"[+-]?(?:[0-9](?:_?[0-9])*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.])"
)
_STRING = re.compile(
    r"([rRuU]?)(?:"
    r'"""((?:[^"\\]++|\\.|"(?!""))*+)"""|'
    r"'''((?:[^'\\]++|\\.|'(?!''))*+)'''|"
    r'"((?:[^"\\\n]++|\\.)*+)"|'
    r"'((?:[^'\\\n]++|\\.)*+)')",
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(\n|[\\'\"abfnrtv]))"
)
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
_CONSTANTS = {
    "True": True,
    "true": True,
    "False": False,
    "false": False,
    "None": None,
    "null": None,
}
_END = {"[": "]", "(": ")", "{": "}"}


class LiteralFault(ValueError):
    """What stands at `at` is not what the syntax wants there."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(reason)
        self.at = at


def literal(text: str) -> Any:
    """The value that the whole of `text` writes; ValueError where it is no literal."""
    reader = PythonReader(text, 0)
    value = reader.value()
    if reader.skip() < len(text):
        reader.fail("more text follows the literal")
    return value


class PythonCall(NamedTuple):
    """A call and where it stands in the text."""

    name: str
    arguments: dict[str, Any]
    start: int
    stop: int


class PythonReader:
    """Reads forward from `at`; every method leaves `at` behind what it read.

    Raises:
        LiteralFault: From all methods, with the position of the fault.
    """

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def skip(self) -> int:
        """Go past white space; the position there."""
        gap = _GAP.match(self.text, self.at)
        if gap is not None:
            self.at = gap.end()
        return self.at

    def take(self, sign: str) -> bool:
        """Whether `sign` stands next, white space aside; if so go past it."""
        found = self.text.startswith(sign, self.skip())
        if found:
            self.at += len(sign)
        return found

    def fail(self, reason: str) -> NoReturn:
        """Raise a fault here, with what stands here."""
        seen = self.text[self.at : self.at + 20]
        raise LiteralFault(f"{reason}: {seen!r}" if seen else f"{reason}: the text ends", self.at)

    def call(self) -> tuple[str, dict[str, Any]]:
        """A name and the keyword arguments of a call such as ``f(x=1, y="a")``."""
        self.skip()
        name = _NAME.match(self.text, self.at)
        if name is None:
            self.fail("expected the name of a function")
        self.at = name.end()
        if not self.take("("):
            self.fail(f"expected ( after {name[0]}")
        return name[0], self.keywords()

    def call_list(self) -> list[PythonCall]:
        """What a list such as ``[f(x=1), g()]`` holds; at least one call."""
        if not self.take("["):
            self.fail("expected [")
        calls: list[PythonCall] = []
        while not calls or not self.take("]"):
            start = self.skip()
            name, arguments = self.call()
            calls.append(PythonCall(name, arguments, start, self.at))
            if not self.take(",") and not self.text.startswith("]", self.at):
                self.fail("expected , or ]")
        return calls

    def statement(self) -> list[PythonCall]:
        """The calls of one statement: a call, a list of calls, or one inside ``print(…)``."""
        if self.text.startswith("[", self.skip()):
            return self.call_list()
        printed = _PRINT.match(self.text, self.at)
        start = self.at
        self.at = start if printed is None else printed.end()
        name, arguments = self.call()
        if printed is not None and not self.take(")"):
            self.fail("expected ) after print")
        stop = self.at
        self.take(";")
        return [PythonCall(name, arguments, start, stop)]

    def keywords(self) -> dict[str, Any]:
        """What stands between ``(`` and ``)``; of equal names the last one counts."""
        arguments: dict[str, Any] = {}
        while not self.take(")"):
            name = _NAME.match(self.text, self.at)
            if name is None:
                self.fail("expected name=value")
            self.at = name.end()
            if not self.take("="):
                self.at = name.start()
                self.fail("expected name=value")
            arguments[name[0]] = self._argument()
            if not self.take(",") and not self.text.startswith(")", self.at):
                self.fail("expected , or )")
        return arguments

    def _argument(self) -> Any:
        # Long lists are mostly JSON as well, which is read many times faster.
        if self.text[self.skip() : self.at + 1] in ("[", "{"):
            try:
                value, self.at = value_at(self.text, self.at)
            except ValueError:
                return self.value()
            return value
        return self.value()

    def value(self, depth: int = 0) -> Any:
        """One literal."""
        self.skip()
        opening = self.text[self.at : self.at + 1]
        if opening in _END and opening:
            if depth == MAX_DEPTH:
                self.fail("nested too deeply")
            self.at += 1
            return self._dict(depth + 1) if opening == "{" else self._list(_END[opening], depth + 1)
        if (number := _NUMBER.match(self.text, self.at)) is not None:
            return self._number(number)
        if (string := _STRING.match(self.text, self.at)) is not None:
            return self._string(string)
        name = _NAME.match(self.text, self.at)
        if name is None or name[0] not in _CONSTANTS:
            self.fail("expected a literal")
        self.at = name.end()
        return _CONSTANTS[name[0]]

    def _list(self, end: str, depth: int) -> Any:
        items: list[Any] = []
        commas = 0
        while not self.take(end):
            items.append(self.value(depth))
            if self.take(","):
                commas += 1
            elif not self.text.startswith(end, self.at):
                self.fail(f"expected , or {end}")
        is_group = end == ")" and len(items) == 1 and not commas  # (1) is 1, (1,) is [1]
        return items[0] if is_group else items

    def _dict(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not self.take("}"):
            key = self.value(depth)
            if not isinstance(key, str):
                self.fail("the keys of a dict must be strings")
            if not self.take(":"):
                self.fail("expected : after a key")
            items[key] = self.value(depth)
            if not self.take(",") and not self.text.startswith("}", self.at):
                self.fail("expected , or }")
        return items

    def _number(self, match: re.Match[str]) -> int | float:
        written = match[0].replace("_", "")
        try:
            number = finite(written) if any(sign in written for sign in ".eE") else int(written)
        except ValueError:
            self.fail("expected a number within bounds")
        self.at = match.end()
        return number

    def _string(self, match: re.Match[str] | None) -> str:
        pieces: list[str] = []
        while match is not None:  # strings that stand side by side are one
            prefix, *bodies = match.groups()
            body = next(body for body in bodies if body is not None)
            pieces.append(body if prefix in ("r", "R") else _unescaped(body))
            self.at = match.end()
            match = _STRING.match(self.text, self.skip())
        return "".join(pieces)


def _unescaped(body: str) -> str:
    return _ESCAPE.sub(_character, body) if "\\" in body else body


def _character(escape: re.Match[str]) -> str:
    octal, *hexadecimal, sign = escape.groups()
    if sign is not None:
        return _ESCAPED.get(sign, sign)
    code = int(octal, 8) if octal else int(next(digits for digits in hexadecimal if digits), 16)
    return chr(code) if code <= 0x10FFFF else escape[0]
