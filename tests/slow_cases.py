"""Parameters of which `make test` runs a few, always the same ones, and `make test-full` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Mark the cases `slow` but those in `fast`; a tuple holds the values of several parameters."""
    several = list(cases)
    assert all(each in several for each in fast), f"{fast} are not all among the cases"
    return [each if each in fast else _slow(each) for each in several]


def slow_after(count: int, cases: Iterable[Any]) -> list[Any]:
    """Mark the cases `slow` but the first `count`."""
    several = list(cases)
    return several[:count] + [_slow(each) for each in several[count:]]


def _slow(case: Any) -> Any:
    values = case if type(case) is tuple else (case,)  # a named tuple is one value
    return pytest.param(*values, marks=pytest.mark.slow)
