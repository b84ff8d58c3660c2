"""Tools from Python files."""

from __future__ import annotations

import functools
import inspect
import re
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

#: The file will import it in any case.
_IMPORTS_VERL = re.compile(rb"^\s*(from|import)\s+verl\b", re.MULTILINE)


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
    """Functions of the module in verl's registry, where the module uses verl."""
    if not any(_home(value).split(".")[0] == "verl" for value in vars(module).values()):
        return
    for name, entry in _verl_registry().items():
        if entry.fn.__module__ == module.__name__:
            yield _function_of_verl(entry.fn, name)


def _forget_in_verl(file: Path) -> None:
    """Let a file that uses verl be run again: verl's registry refuses a name that it has."""
    if not _IMPORTS_VERL.search(file.read_bytes()):
        return
    registry = _verl_registry()
    for name in [name for name, entry in registry.items() if _file_of(entry.fn) == file]:
        del registry[name]


def _file_of(function: Any) -> Path | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else Path(code.co_filename).resolve()


def _verl_registry() -> dict[str, Any]:
    """What functions decorated by verl are kept in; empty where a version has none."""
    try:
        from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return {}
    registry: dict[str, Any] = FUNCTION_TOOL_REGISTRY
    return registry


def _home(value: Any) -> str:
    """The module that something at the top level of a module comes from, or is."""
    return str(getattr(value, "__module__", None) or getattr(value, "__name__", None) or "")


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
