"""Tools from files: Python files of ours, and the tool configurations of verl."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rollout.errors import ToolError
from rollout.tools.function import FunctionTool
from rollout.tools.schema import as_openai_schema
from rollout.tools.tool import Tool
from rollout.tools.verl import VerlSchema, VerlTool, verl_result
from rollout.user_files import UserCodeError, import_module, make_importable, run_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType


def load_tools(path: str | Path) -> list[Tool]:
    """The tools at the top level of a Python file, which is run: decorated functions and objects.

    Functions decorated with verl's own ``function_tool`` count too. The file's directory becomes
    importable.

    Raises:
        ToolError: There is no such file, it raises, or it has no tools.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise ToolError(f"load_tools: {path} is no file")
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
    registry = getattr(sys.modules.get("verl.tools.function_tool"), "FUNCTION_TOOL_REGISTRY", {})
    for name, entry in registry.items():
        if entry.fn.__module__ == module.__name__:
            yield _function_of_verl(entry.fn, name)


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


def load_verl_tools(yaml_path: str | Path) -> list[Tool]:
    """The tools of a verl tool configuration, their classes unchanged.

    Each entry of ``tools`` has ``class_name`` (``package.module.Class``), ``config`` (given to the
    class as it is) and ``tool_schema`` (kept whole; without one the class is asked). The working
    directory and that of the file become importable.

    Raises:
        ToolError: It lists the faults of all entries.
    """
    entries = _entries(Path(yaml_path))
    make_importable(Path.cwd())
    make_importable(Path(yaml_path).resolve().parent)
    tools: list[Tool] = []
    faults = []
    for number, entry in enumerate(entries):
        try:
            tools.append(_tool_of(entry, f"{yaml_path}: tools[{number}]"))
        except ToolError as error:
            faults.append(f"tools[{number}]{error}")
    if faults:
        raise ToolError(f"{yaml_path}: {'; '.join(faults)}")
    return tools


def _entries(file: Path) -> list[Any]:
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ToolError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ToolError(f"{file}: no YAML: {' '.join(str(error).split())}") from None
    entries = data.get("tools") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ToolError(f"{file}: tools = {entries!r:.80}; expected a list of tools")
    return entries


def _tool_of(entry: Any, origin: str) -> Tool:
    """The tool of one entry; an error's text goes on behind the entry's path."""
    if not isinstance(entry, dict):
        raise ToolError(f" = {entry!r:.80}: expected class_name, config and tool_schema")
    config = {} if entry.get("config") is None else entry["config"]
    if not isinstance(config, dict):
        raise ToolError(f".config = {config!r:.80}: expected a mapping")
    _refuse_interpolation(entry, "")
    kind = config.get("type", "native")
    if kind == "mcp":
        raise ToolError(
            ".config.type = 'mcp': servers are opened, not loaded; use "
            "rollout.tools.connect_mcp and give its tools to open_rollout"
        )
    if kind != "native":
        raise ToolError(f".config.type = {kind!r:.80}: expected 'native' or 'mcp'")
    cls = _class_named(entry.get("class_name"))
    given = entry.get("tool_schema")
    schema = None if given is None else as_openai_schema(given, ".tool_schema")
    try:
        tool = cls(config=config, tool_schema=None if schema is None else VerlSchema(schema))
    except Exception as error:
        raise ToolError(f": {cls.__name__} raised {type(error).__name__}: {error}") from error
    try:
        return VerlTool(tool, schema=schema, origin=f"{origin} {cls.__name__}")
    except ToolError as error:
        raise ToolError(f": {error}") from None


def _refuse_interpolation(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_interpolation(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_interpolation(item, f"{path}[{index}]")
    elif isinstance(value, str) and "${" in value:
        raise ToolError(f"{path} = {value!r:.80}: interpolation is not resolved; write the value")


def _class_named(name: Any) -> Any:
    module, _, cls_name = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if not module or not cls_name:
        raise ToolError(f".class_name = {name!r:.80}: expected package.module.Class")
    try:
        cls = getattr(import_module(module), cls_name, None)
    except UserCodeError as error:
        raise ToolError(f".class_name = {name!r}: {error}") from error
    if not inspect.isclass(cls):
        raise ToolError(f".class_name = {name!r}: {module} has no class {cls_name}")
    return cls
