"""Tools, users and rewards from Python files and modules that a command names."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from rollout.errors import ConfigError
from rollout.interactions import Interaction
from rollout.tools import Tool
from rollout.tools.shipped import is_shipped, shipped_tools

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.scheduling.rewards import RewardFunction

logger = logging.getLogger("rollout")


@attrs.define
class UserCode:
    """Runs each file once, however many options name it.

    A file's directory and the working directory become importable, as they are under
    ``python file.py``; agents that the file registers are known from then on.
    """

    _modules: dict[Path, ModuleType] = attrs.field(factory=dict)

    def tools(self, path: str) -> list[Tool]:
        """The `Tool` objects that a file has at its top level, decorated functions included.

        Or the shipped tools of these names, separated by commas: ``python,finish``.

        Raises:
            ConfigError: It cannot be read or run, or has none.
        """
        if is_shipped(path):
            return shipped_tools(path.split(","))
        option = f"--tools {path}"
        values = vars(self._file(path, option)).values()
        found = list({id(value): value for value in values if isinstance(value, Tool)}.values())
        if not found:
            raise ConfigError(
                f"{option}: no tools; expected functions decorated with "
                "@rollout.function_tool, or Tool objects, at the top level of the file"
            )
        return found

    def interactions(self, path: str) -> list[type[Interaction]]:
        """The named `Interaction` classes that a file defines, for `open_rollout`."""
        if is_shipped(path):
            return []
        module = self._file(path, f"--tools {path}")
        return [
            value
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, Interaction)
            and value.__module__ == module.__name__
            and hasattr(value, "name")
        ]

    def reward(self, reference: str) -> RewardFunction:
        """The function behind ``path.py:function`` or ``package.module:function``.

        Raises:
            ConfigError: There is none, or it cannot be called.
        """
        option = f"--reward {reference}"
        source, _, name = reference.rpartition(":")
        if not source or not name:
            raise ConfigError(f"{option}: expected path.py:function or package.module:function")
        is_file = source.endswith(".py")
        module = self._file(source, option) if is_file else _imported(source, option)
        function: Any = getattr(module, name, None)
        if not callable(function):
            what = "no such function" if function is None else f"{name} cannot be called"
            raise ConfigError(f"{option}: {what} in {source}")
        reward: RewardFunction = function
        return reward

    def _file(self, path: str, option: str) -> ModuleType:
        file = Path(path).resolve()
        if file not in self._modules:
            if not file.is_file():
                raise ConfigError(f"{option}: {path} is no file")
            self._modules[file] = _loaded(option, file, lambda: _executed(file))
        return self._modules[file]


def _imported(name: str, option: str) -> ModuleType:
    _make_importable(Path.cwd())
    return _loaded(option, name, lambda: importlib.import_module(name))


def _loaded(option: str, source: object, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except (Exception, SystemExit) as error:
        logger.info("%s", "".join(traceback.format_exception(error)))
        text = " ".join(str(error).split())
        place = _place(error, str(source))
        raise ConfigError(f"{option}: {place}{type(error).__name__}: {text}") from error


def _place(error: BaseException, source: str) -> str:
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == source
    ]
    return f"line {lines[-1]}: " if lines else ""


def _executed(file: Path) -> ModuleType:
    _make_importable(file.parent)
    # Compiled here and not by an importer, which would leave bytecode beside the file.
    code = compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    module = ModuleType(f"rollout file {file}")  # a name that no import can have
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses and type hints look it up
    try:
        exec(code, vars(module))
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


def _make_importable(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
