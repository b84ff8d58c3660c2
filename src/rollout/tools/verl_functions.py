"""Functions decorated by verl's own ``function_tool``, which files of tools may contain."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.tools.function import FunctionTool
from rollout.tools.results import NO_OUTPUT, ToolResult, normalise_result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from rollout.tools.tool import Tool

#: The file will import it in any case.
_IMPORTS_VERL = re.compile(rb"^\s*(from|import)\s+verl\b", re.MULTILINE)


def registered_in_verl(module: ModuleType) -> Iterator[Tool]:
    """Functions of the module in verl's registry, where the module uses verl."""
    if not any(_home(value).split(".")[0] == "verl" for value in vars(module).values()):
        return
    for name, entry in _verl_registry().items():
        if entry.fn.__module__ == module.__name__:
            yield _function_of_verl(entry.fn, name)


def forget_in_verl(file: Path) -> None:
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


def verl_result(answer: Any) -> ToolResult:
    """The result in what verl's tools return: ``(response, reward, metrics)`` or less.

    Its images and videos are lists, as verl wants them.

    Raises:
        MediaError: They are not.
    """
    if isinstance(answer, tuple) and answer:
        if len(answer) == 1:
            return verl_result(answer[0])
        return normalise_result((_response(answer[0]), *answer[1:]))
    return normalise_result(_response(answer))


def _response(value: Any) -> Any:
    if not (hasattr(value, "text") and hasattr(value, "image")):
        return value
    shown: dict[str, Any] = {
        "images": value.image or (),
        "videos": getattr(value, "video", None) or (),
    }
    silence = "" if any(map(len, shown.values())) else NO_OUTPUT
    return ToolResult(silence if value.text is None else value.text, **shown)
