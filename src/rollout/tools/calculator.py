"""A calculator that models can call, bounded so that it cannot hang."""

from __future__ import annotations

import ast
import math
import operator
from typing import TYPE_CHECKING, Any

from rollout.tools.function_tools import function_tool
from rollout.tools.results import ToolResult, error_result

if TYPE_CHECKING:
    from collections.abc import Callable

Number = int | float

MAX_EXPRESSION = 1000
#: Bits of an exact integer: some 1200 digits.
MAX_BITS = 4096
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})


class CalculationError(ValueError):
    """The expression has no value; the text says why, for a model to read."""


def calculate(expression: str) -> Number:
    """Calculate the value of an arithmetic expression, with Python's precedence.

    Operators: ``+ - * / // % **`` and parentheses; ``×``, ``·``, ``÷`` and ``−`` are read as
    ``*``, ``*``, ``/`` and ``-``, and ``^`` as power. Integers stay exact, also through ``/``
    where it leaves no rest.

    Raises:
        CalculationError: It is no such expression, divides by zero, has no real value, is nested
            too deep for Python, or passes a bound: 1000 characters, integers of 4096 bits.
    """
    if (size := len(expression)) > MAX_EXPRESSION:
        raise CalculationError(f"the expression has {size} characters; at most {MAX_EXPRESSION}")
    text = " ".join(expression.translate(_SPELLINGS).split())
    try:
        return _evaluate(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise CalculationError(error.msg) from None
    except (MemoryError, RecursionError):
        raise CalculationError("nested too deep") from None
    except ZeroDivisionError:
        raise CalculationError("division by zero") from None
    except OverflowError:
        raise CalculationError("the result is too large") from None


def format_number(value: Number) -> str:
    """A plain number: all digits of an int, 15 significant ones of a float (``0.3``, ``12``)."""
    # Adding 0.0 turns -0.0 into 0.0.
    return str(value) if isinstance(value, int) else format(value + 0.0, ".15g")


def _evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as result) if not isinstance(result, bool):
            pass
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            result = _OPERATIONS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            result = _OPERATIONS[type(op)](_evaluate(left), _evaluate(right))
        case ast.Tuple():
            raise CalculationError("write numbers without commas")
        case _:
            raise CalculationError(f"{ast.unparse(node)!r:.80} is no arithmetic")
    if isinstance(result, complex):
        raise CalculationError("a negative number to a fractional power is not real")
    if result.bit_length() > MAX_BITS if isinstance(result, int) else not math.isfinite(result):
        raise OverflowError
    return result


def _divide(left: Number, right: Number) -> Number:
    are_exact = isinstance(left, int) and isinstance(right, int)
    return left // right if are_exact and right and left % right == 0 else left / right


def _raise_power(left: Number, right: Number) -> Any:
    are_exact = isinstance(left, int) and isinstance(right, int)
    if are_exact and abs(left) > 1 and int(left).bit_length() * right > 2 * MAX_BITS:
        raise OverflowError  # before it is computed
    return left**right


_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
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
