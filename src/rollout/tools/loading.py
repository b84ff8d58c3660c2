"""Tools from Python files."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.errors import ToolError
from rollout.tools.function import FunctionTool
from rollout.tools.tool import Tool
from rollout.tools.verl import verl_result
from rollout.user_files import UserCodeError, run_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType


def load_tools(path: str | Path) -> list[Tool]:
    """The tools at the top level of a Python file, which is run: decorated functions and objects.

    Functions decorated with verl's own ``function_tool`` count too. The file's directory becomes
    importable. A file may be loaded again, and is run again then.

    Raises:
        ToolError: There is no such file, it raises, or it has no tools.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise ToolError(f"load_tools: {path} is no file")
    _forget_in_verl(file)
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


def tools_of(module: ModuleType) -> list[Tool]:
    """The tools at the top level of a module."""
    values = vars(module).values()
    ours = list({id(value): value for value in values if isinstance(value, Tool)}.values())
    return [*ours, *_registered_in_verl(module)]


def _registered_in_verl(module: ModuleType) -> Iterator[Tool]:
    """Functions of the module in verl's registry, where the module has imported verl."""
    for name, entry in _verl_registry().items():
        if entry.fn.__module__ == module.__name__:
            yield _function_of_verl(entry.fn, name)


def _forget_in_verl(file: Path) -> None:
    """Let the file be run again: verl's registry refuses a name that it has."""
    registry = _verl_registry()
    for name in [name for name, entry in registry.items() if _file_of(entry.fn) == file]:
        del registry[name]


def _file_of(function: Any) -> Path | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else Path(code.co_filename).resolve()


def _verl_registry() -> dict[str, Any]:
    """What functions decorated by verl are kept in; empty where verl is not imported."""
    module = sys.modules.get("verl.tools.function_tool")
    registry: dict[str, Any] = getattr(module, "FUNCTION_TOOL_REGISTRY", {})
    return registry


def _function_of_verl(function: Callable[..., Any], name: str) -> Tool:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            return verl_result(await function(*args, **kwargs))

        return FunctionTool(run_async, name=name, backend="asyncio")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return verl_result(function(*args, **kwargs))

    return FunctionTool(run, name=name)
