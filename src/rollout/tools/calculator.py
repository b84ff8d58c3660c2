"""A calculator that models can call, bounded so that it cannot hang."""

from __future__ import annotations

import ast
import math
import operator
import re
from typing import TYPE_CHECKING

from rollout.tools.function_tools import function_tool
from rollout.tools.results import ToolResult, error_result

if TYPE_CHECKING:
    from collections.abc import Callable

Number = int | float

MAX_EXPRESSION = 1000
MAX_DEPTH = 50
#: Bits of an exact integer: some 1200 digits.
MAX_BITS = 4096

_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})
#: Python refuses numbers such as 007.
_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=[0-9])")


class CalculationError(ValueError):
    """The expression has no value; the text says why, for a model to read."""


def calculate(expression: str) -> Number:
    """Calculate the value of an arithmetic expression, with Python's precedence.

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
    text = _LEADING_ZEROS.sub("", " ".join(expression.translate(_SPELLINGS).split()))
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else "nested too deep"
        raise CalculationError(problem) from None
    try:
        return _evaluate(tree.body, MAX_DEPTH)
    except ZeroDivisionError:
        raise CalculationError("division by zero") from None
    except OverflowError:
        raise CalculationError("the result is too large") from None


def format_number(value: Number) -> str:
    """A plain number: all digits of an int, 15 significant ones of a float (``0.3``, ``12``)."""
    # Adding 0.0 turns -0.0 into 0.0.
    return str(value) if isinstance(value, int) else format(value + 0.0, ".15g")


def _evaluate(node: ast.expr, depth: int) -> Number:
    if not depth:
        raise CalculationError(f"nested deeper than {MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result: Number = value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _evaluate(operand, depth - 1)
            result = -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            # A chain such as 1 + 2 + 3 nests on the left, and is not deep.
            terms = [_evaluate(right, depth - 1)]
            operators = [op]
            while isinstance(left, ast.BinOp) and type(left.op) in _OPERATIONS:
                terms.append(_evaluate(left.right, depth - 1))
                operators.append(left.op)
                left = left.left
            result = _evaluate(left, depth - 1)
            for each, term in zip(reversed(operators), reversed(terms), strict=True):
                result = _check_size(_OPERATIONS[type(each)](result, term))
        case ast.Tuple():
            raise CalculationError("write numbers without commas")
        case _:
            raise CalculationError(f"{ast.unparse(node)!r:.80} is no arithmetic")
    return _check_size(result)


def _check_size(value: Number) -> Number:
    is_large = value.bit_length() > MAX_BITS if isinstance(value, int) else not math.isfinite(value)
    if is_large:
        raise OverflowError
    return value


def _divide(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right
    return left / right


def _raise_power(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and right >= 0:
        if abs(left) > 1 and left.bit_length() * right > 2 * MAX_BITS:
            raise OverflowError
        return int(left**right)
    if left < 0 and right != math.floor(right):
        raise CalculationError("a negative number to a fractional power is not real")
    return float(left) ** right


_OPERATIONS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _raise_power,
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
