"""Tools from Python files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.errors import ToolError
from rollout.lazy import lazy_exports
from rollout.tools.tool import Tool, ToolProvider
from rollout.user_files import UserCodeError, run_file

if TYPE_CHECKING:
    from types import ModuleType

_IMPORTS_VERL = re.compile(rb"^\s*(from|import)\s+verl\b", re.MULTILINE)
#: What reads verl's own registry of functions lives above; it is imported for files that use verl.
_import_reader = lazy_exports(
    {"__name__": __name__},
    {"rollout.integrations.verl.function_tools": ("forget_functions", "find_functions")},
)


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
