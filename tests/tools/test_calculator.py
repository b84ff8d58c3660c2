"""The calculator: Python's arithmetic, exact integers, and nothing that can hang or escape."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.tools import ToolResult, calculator
from rollout.tools.builtin import calculate, format_number


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("(3 + 4) * 5", "35"),
        ("2 ** 3 ** 2", "512"),
        ("2 ^ 10", "1024"),
        ("-2 ** 2", "-4"),
        ("2 ** -1", "0.5"),
        ("6 / 2", "3"),
        ("7.5 // 2", "3"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333333333"),
        ("-0.0", "0"),
        ("1.5e3 + 2E-1", "1500.2"),
        ("3 × 4 ÷ 2 − 1 · 2", "4"),
        ("123456789012345678901234567890 * 10 + 1", "1234567890123456789012345678901"),
        (f"{10**40} / 10", str(10**39)),
        ("(-1) ** 999999999", "-1"),
        ("4 ** 0.5", "2"),
        ("1e16 * 10", "1e+17"),
    ],
)
def test_calculator_expression_has_its_value(expression: str, text: str) -> None:
    assert format_number(calculate(expression)) == text


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "invalid syntax"),
        ("(1 + 2", "'(' was never closed"),
        ("1,000", "write numbers without commas"),
        ("__import__('os')", "\"__import__('os')\" is no arithmetic"),
        ("True + 1", "'True' is no arithmetic"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("(-8) ** 0.5", "a negative number to a fractional power is not real"),
        ("9 ** 9 ** 9", "the result is too large"),
        ("2.5 ** 1e6", "the result is too large"),
        ("1e308 * 10", "the result is too large"),
        (f"{10**400} * 1.5", "the result is too large"),
        ("-" * 999 + "1", "nested too deep"),
        ("1" * 1001, "the expression has 1001 characters; at most 1000"),
        ("2 ** 4000 * 2 ** 100", "the result is too large"),
    ],
)
def test_calculator_impossible_expression_says_why(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        calculate(expression)
    assert str(caught.value) == message


numbers = st.integers(0, 999).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(" ".join)
        | inner.map(lambda text: f"({text})")
        | inner.map(lambda text: f"-{text}")
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(expressions)
def test_calculator_any_integer_expression_agrees_with_python(expression: str) -> None:
    try:
        expected = eval(expression, {"__builtins__": {}})
    except ZeroDivisionError:
        with pytest.raises(ValueError, match=r"^division by zero$"):
            calculate(expression)
    else:
        assert calculate(expression) == expected


@settings(max_examples=60)
@given(st.text(alphabet="0123456789.e+-*/%^() ×", max_size=60))
def test_calculator_any_text_has_a_finite_value_or_a_reason(expression: str) -> None:
    try:
        value = calculate(expression)
    except ValueError:
        return
    assert math.isfinite(value) if isinstance(value, float) else value.bit_length() <= 4096
    assert format_number(value).strip("-0123456789.e+") == ""


@pytest.mark.anyio
async def test_calculator_tool_answers_with_text() -> None:
    assert await calculator(expression="6 * 7") == ToolResult("42")
    assert await calculator(expression="6 *") == ToolResult(
        "cannot calculate '6 *': invalid syntax", is_error=True
    )
