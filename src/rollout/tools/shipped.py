"""The shipped tools that need no settings, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.tools.calculator import calculator
from rollout.tools.finish_tool import finish, submit
from rollout.tools.python_tool import PythonTool
from rollout.tools.shell_tool import ShellTool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.tools.tool import Tool

SHIPPED: Mapping[str, Callable[[], Tool]] = {
    "calculator": lambda: calculator,
    "finish": lambda: finish,
    "python": PythonTool,
    "shell": ShellTool,
    "submit": lambda: submit,
}


def is_shipped(names: str) -> bool:
    """Whether these names, separated by commas, all are shipped tools."""
    return all(name in SHIPPED for name in names.split(","))


def shipped_tools(names: Sequence[str]) -> list[Tool]:
    """One tool for each name."""
    return [SHIPPED[name]() for name in names]
