"""Tools by name: those that are shipped, and those at the top level of Python files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.errors import ToolError
from rollout.lazy import lazy_exports
from rollout.tools.calculator import calculator
from rollout.tools.finish_tool import finish, submit
from rollout.tools.sandbox_tools import EditTool, PythonTool, ShellTool
from rollout.tools.search_tool import SearchTool
from rollout.tools.tool import Tool, ToolProvider
from rollout.user_files import UserCodeError, run_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

#: The shipped tools that need no settings.
SHIPPED: Mapping[str, Callable[[], Tool]] = {
    "calculator": lambda: calculator,
    "edit": EditTool,
    "finish": lambda: finish,
    "python": PythonTool,
    "shell": ShellTool,
    "submit": lambda: submit,
}
_IMPORTS_VERL = re.compile(rb"^\s*(from|import)\s+verl\b", re.MULTILINE)
#: What reads verl's own registry of functions lives above; it is imported for files that use verl.
_import_reader = lazy_exports(
    {"__name__": __name__},
    {"rollout.integrations.verl.function_tools": ("forget_functions", "find_functions")},
)


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


def load_tools(path: str | Path) -> list[Tool | ToolProvider]:
    """The tools at the top level of a Python file, which is run: decorated functions and objects.

    Functions decorated with verl's own ``function_tool`` count too. The file's directory becomes
    importable. A file may be loaded again, and is run again then.

    Raises:
        ToolError: There is no such file, it raises, or it has no tools.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise ToolError(f"load_tools: {path} is no file")
    if _IMPORTS_VERL.search(file.read_bytes()):
        _import_reader("forget_functions")(file)
    try:
        module = run_file(file)
    except UserCodeError as error:
        raise ToolError(f"load_tools: {path}: {error}") from error
    tools = find_tools(module)
    if not tools:
        raise ToolError(
            f"load_tools: {path}: no tools; expected functions decorated with "
            "@rollout.function_tool, or Tool objects, at the top level of the file"
        )
    return tools


def find_tools(module: ModuleType) -> list[Tool | ToolProvider]:
    """The tools at the top level of a module."""
    values = vars(module).values()
    ours = {id(value): value for value in values if isinstance(value, Tool | ToolProvider)}
    homes = [getattr(v, "__module__", None) or getattr(v, "__name__", None) for v in values]
    if not any(str(home).partition(".")[0] == "verl" for home in homes):
        return list(ours.values())
    return [*ours.values(), *_import_reader("find_functions")(module)]
