"""Tools from Python files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rollout.errors import ToolError
from rollout.tools.providers import ToolProvider
from rollout.tools.tool import Tool
from rollout.tools.verl_functions import forget_in_verl, registered_in_verl
from rollout.user_files import UserCodeError, run_file

if TYPE_CHECKING:
    from types import ModuleType


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
    forget_in_verl(file)
    try:
        module = run_file(file)
    except UserCodeError as error:
        raise ToolError(f"load_tools: {path}: {error}") from error
    found = tools_of(module)
    if not found:
        raise ToolError(
            f"load_tools: {path}: no tools; expected functions decorated with "
            "@rollout.function_tool, or Tool objects, at the top level of the file"
        )
    return found


def tools_of(module: ModuleType) -> list[Tool | ToolProvider]:
    """The tools at the top level of a module."""
    values = vars(module).values()
    ours = {id(value): value for value in values if isinstance(value, Tool | ToolProvider)}
    return [*ours.values(), *registered_in_verl(module)]
