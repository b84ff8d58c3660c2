"""A calculator that models can call: its own small parser, bounded so that it cannot hang."""

from __future__ import annotations

import math
import operator
import re
from typing import TYPE_CHECKING

import msgspec

from rollout.tools.function import function_tool
from rollout.tools.results import ToolResult, error_result

if TYPE_CHECKING:
    from collections.abc import Callable

Number = int | float

MAX_EXPRESSION = 1000
MAX_DEPTH = 50
#: Bits of an exact integer: some 1200 digits.
MAX_BITS = 4096

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<operator>\*\*|//|[-+*/%()^×·÷−]))"
)
_SPELLINGS = {"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"}

_END = "the end"
_UNARY_PRECEDENCE = 3
#: Precedence of the binary operators; a higher one binds tighter, ``**`` from right to left.
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "**": 4}


class CalculationError(ValueError):
    """The expression has no value; the text says why, for a model to read."""


def calculate(expression: str) -> Number:
    """The value of an arithmetic expression, with Python's precedence.

    Operators: ``+ - * / // % **`` and parentheses; ``×``, ``·``, ``÷`` and ``−`` are read as
    ``*``, ``*``, ``/`` and ``-``, and ``^`` as power. Integers stay exact, also through ``/``
    where it leaves no rest.

    Raises:
        CalculationError: It is no such expression, divides by zero, has no real value, or passes
            a bound: 1000 characters, 50 levels of nesting, integers of 4096 bits.
    """
    if len(expression) > MAX_EXPRESSION:
        raise CalculationError(
            f"the expression has {len(expression)} characters; at most {MAX_EXPRESSION}"
        )
    parser = _Parser(_tokens(expression))
    value = parser.expression(0)
    parser.expect(_END)
    return value


def format_number(value: Number) -> str:
    """A plain number: all digits of an int, 15 significant ones of a float (``0.3``, ``12``)."""
    # Adding 0.0 turns -0.0 into 0.0.
    return str(value) if isinstance(value, int) else format(value + 0.0, ".15g")


class _Token(msgspec.Struct, frozen=True):
    text: str
    position: int
    is_number: bool = False


def _tokens(expression: str) -> list[_Token]:
    tokens, position = [], 0
    stop = len(expression.rstrip())
    while position < stop:
        match = _TOKEN.match(expression, position)
        if match is None:
            rest = expression[position:].lstrip()
            at = len(expression) - len(rest) + 1
            raise CalculationError(f"unexpected {rest[0]!r} at position {at}")
        kind = match.lastgroup or ""
        text = _SPELLINGS.get(match[kind], match[kind])
        tokens.append(_Token(text, match.start(kind) + 1, kind == "number"))
        position = match.end()
    return [*tokens, _Token(_END, stop + 1)]


class _Parser:
    """Precedence climbing over a list of tokens."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._next = 0
        self._depth = 0

    def expression(self, minimum: int) -> Number:
        """The value of what follows, as far as operators of at least this precedence reach."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise CalculationError(f"nested deeper than {MAX_DEPTH} levels")
        value = self._operand()
        while (precedence := _PRECEDENCE.get(self._tokens[self._next].text, 0)) and (
            precedence >= minimum
        ):
            symbol = self._take().text
            right = self.expression(precedence if symbol == "**" else precedence + 1)
            value = _apply(symbol, value, right)
        self._depth -= 1
        return value

    def expect(self, text: str) -> None:
        """Take this token, or say what stands in its place."""
        token = self._take()
        if token.text != text:
            raise CalculationError(_unexpected(token, text if text == _END else repr(text)))

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        self._next += 1
        return token

    def _operand(self) -> Number:
        token = self._take()
        if token.is_number:
            return _literal(token.text)
        if token.text == "(":
            value = self.expression(0)
            self.expect(")")
            return value
        if token.text in ("-", "+"):
            value = self.expression(_UNARY_PRECEDENCE)
            return -value if token.text == "-" else value
        raise CalculationError(_unexpected(token, "a number"))


def _unexpected(token: _Token, expected: str) -> str:
    found = token.text if token.text == _END else repr(token.text)
    return f"expected {expected} at position {token.position}, found {found}"


def _literal(text: str) -> Number:
    return _bounded(int(text) if text.isdecimal() else float(text))


def _apply(symbol: str, left: Number, right: Number) -> Number:
    try:
        return _bounded(_OPERATIONS[symbol](left, right))
    except ZeroDivisionError:
        raise CalculationError("division by zero") from None
    except OverflowError:
        raise CalculationError("the result is too large") from None


def _bounded(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise CalculationError("the result is too large")
    elif not math.isfinite(value):
        raise CalculationError("the result is too large")
    return value


def _divide(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right
    return left / right


def _power(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and right > 0:
        if abs(left) > 1 and left.bit_length() * right > 2 * MAX_BITS:
            raise OverflowError
        return int(left**right)
    if left < 0 and right != math.floor(right):
        raise CalculationError("a negative number to a fractional power is not real")
    return 1 if right == 0 and isinstance(left, int) else float(left) ** right


_OPERATIONS: dict[str, Callable[[Number, Number], Number]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": _power,
}


@function_tool
async def calculator(expression: str) -> ToolResult:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, e.g. "(3 + 4) * 5".
    """
    try:
        return ToolResult(format_number(calculate(expression)))
    except CalculationError as error:
        return error_result(f"cannot calculate {expression!r:.100}: {error}")
