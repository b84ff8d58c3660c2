"""Tools at the top level of Python files."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.errors import ToolError
from rollout.tools.tool import Tool, ToolProvider
from rollout.user_code import UserCodeError, run_file

if TYPE_CHECKING:
    from types import ModuleType

#: What reads verl's own registry of functions lives above; it is imported where verl is.
READER = "rollout.integrations.verl.function_tools"


def load_tools(path: str | Path) -> list[Tool | ToolProvider]:
    """The tools at the top level of a Python file, which is run: decorated functions and objects.

    Also functions decorated with verl's own ``function_tool``. The file's directory becomes
    importable. A `ToolError` where there is no such file, it raises, or it has no tools.
    """
    file = Path(path).resolve()
    if not os.path.isfile(file):
        raise ToolError(f"load_tools: {path} is no file")
    if "verl" in sys.modules:
        importlib.import_module(READER).forget_functions(file)
    try:
        return find_tools(run_file(file))
    except (UserCodeError, ToolError) as error:
        raise ToolError(f"load_tools: {path}: {error}") from error


def find_tools(module: ModuleType) -> list[Tool | ToolProvider]:
    """The tools at the top level of a module; a `ToolError` where it has none."""
    values = vars(module).values()
    tools = {id(value): value for value in values if isinstance(value, Tool | ToolProvider)}
    found = list(tools.values())
    if "verl" in sys.modules:
        found += importlib.import_module(READER).find_functions(module)
    if found:
        return found
    expected = "functions decorated with @rollout.function_tool, or Tool objects"
    raise ToolError(f"no tools; expected {expected}, at the top level of the file")
