"""The shipped tools, by name: for the command line and the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.tools.calculator import calculator
from rollout.tools.finish_tool import finish, submit
from rollout.tools.sandbox_tools import EditTool, PythonTool, ShellTool
from rollout.tools.search_tool import SearchTool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.tools.tool import Tool

#: Those that need no settings.
SHIPPED: Mapping[str, Callable[[], Tool]] = {
    "calculator": lambda: calculator,
    "edit": EditTool,
    "finish": lambda: finish,
    "python": PythonTool,
    "shell": ShellTool,
    "submit": lambda: submit,
}


def is_shipped(names: str) -> bool:
    """Whether these names, separated by commas, all are shipped tools that need no settings."""
    return all(name in SHIPPED for name in names.split(","))


def make_shipped(
    names: Sequence[str], *, search_url: str = "", max_pictures: int = 0
) -> list[Tool]:
    """One tool for each name.

    Args:
        names: Keys of `SHIPPED`, or ``search``.
        search_url: Of the retriever that the search asks.
        max_pictures: Of a program's call, which the model is shown; see `PythonTool`.
    """
    with_settings: dict[str, Callable[[], Tool]] = {
        "python": lambda: PythonTool(max_pictures=max_pictures),
        "shell": lambda: ShellTool(max_pictures=max_pictures),
        "search": lambda: SearchTool(search_url),
    }
    return [{**SHIPPED, **with_settings}[name]() for name in names]
