"""Functions of verl's own ``function_tool``, and what verl's tools answer, as tools of ours."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.tools.function_tools import FunctionTool
from rollout.tools.results import (
    NO_OUTPUT,
    ToolResult,
    check_result,
    error_result,
    normalise_result,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from rollout.tools.tool import Tool


def find_functions(module: ModuleType) -> Iterator[Tool]:
    """Functions of the module in verl's registry."""
    for name, entry in _read_registry().items():
        if entry.fn.__module__ == module.__name__:
            yield wrap_function(entry.fn, name)


def forget_functions(file: Path) -> None:
    """Let a file that uses verl be run again: verl's registry refuses a name that it has."""
    registry = _read_registry()
    for name, entry in list(registry.items()):
        code = getattr(inspect.unwrap(entry.fn), "__code__", None)
        if code is not None and Path(code.co_filename).resolve() == file:
            del registry[name]


def _read_registry() -> dict[str, Any]:
    """What functions decorated by verl are kept in; empty where a version has none."""
    try:
        from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return {}
    registry: dict[str, Any] = FUNCTION_TOOL_REGISTRY
    return registry


def wrap_function(
    function: Callable[..., Any], name: str, schema: dict[str, Any] | None = None
) -> Tool:
    """A function of verl's as a tool; without a schema its own is inferred."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            return read_answer(await function(*args, **kwargs))

        return FunctionTool(run_async, name=name, schema=schema, backend="asyncio")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return read_answer(function(*args, **kwargs))

    return FunctionTool(run, name=name, schema=schema)


def read_answer(answer: Any) -> ToolResult:
    """The result in what verl's tools return: ``(response, reward, metrics)`` or less.

    Its images and videos are lists, as verl wants them.

    Raises:
        MediaError: They are not.
    """
    if not isinstance(answer, tuple) or not answer:
        return _read_response(answer)
    if len(answer) > 3:
        return error_result(
            f"the tool returned a tuple of {len(answer)} items; expected (response, reward) or "
            "(response, reward, metrics)"
        )
    response, *rest = answer
    reward, metrics = [*rest, None, None][:2]
    result = _read_response(response)
    return check_result(
        msgspec.structs.replace(
            result,
            reward=result.reward if reward is None else reward,
            metrics=result.metrics if metrics is None else metrics,
        )
    )


def _read_response(value: Any) -> ToolResult:
    if not (hasattr(value, "text") and hasattr(value, "image")):
        return normalise_result(value)
    media: dict[str, Any] = {
        "images": value.image or (),
        "videos": getattr(value, "video", None) or (),
    }
    silence = "" if any(map(len, media.values())) else NO_OUTPUT
    return check_result(ToolResult(silence if value.text is None else value.text, **media))
