"""Tools, users and rewards from Python files and modules that a command names."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from rollout.errors import ConfigError
from rollout.interactions import Interaction
from rollout.scheduling.reward_signatures import check_group_reward, check_reward
from rollout.tools.shipped import is_shipped, shipped_tools
from rollout.tools.tool_loading import tools_of
from rollout.user_files import UserCodeError, import_module, make_importable, run_file

if TYPE_CHECKING:
    from rollout.scheduling.rewards import GroupRewardFunction, RewardFunction
    from rollout.tools import Tool


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
        found = tools_of(self._file(path, option))
        if not found:
            raise ConfigError(
                f"{option}: no tools; expected functions decorated with "
                "@rollout.function_tool, or Tool objects, at the top level of the file"
            )
        return found

    def agents(self, path: str) -> None:
        """Have the agents known that a file registers.

        Raises:
            ConfigError: It cannot be read or run.
        """
        if not is_shipped(path):
            self._file(path, f"--tools {path}")

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
        """The function named ``path.py:function`` or ``package.module:function``.

        Raises:
            ConfigError: There is none, or it cannot be called with a trajectory.
        """
        option = f"--reward {reference}"
        function: RewardFunction = self._function(reference, option)
        check_reward(function, option)
        return function

    def group_reward(self, reference: str) -> GroupRewardFunction:
        """The function named ``path.py:function`` or ``package.module:function``.

        Raises:
            ConfigError: There is none, or it cannot be called with a group.
        """
        option = f"--group-reward {reference}"
        function: GroupRewardFunction = self._function(reference, option)
        check_group_reward(function, option)
        return function

    def _function(self, reference: str, option: str) -> Any:
        source, _, name = reference.rpartition(":")
        if not source or not name:
            raise ConfigError(f"{option}: expected path.py:function or package.module:function")
        is_file = source.endswith(".py")
        module = self._file(source, option) if is_file else _imported(source, option)
        function: Any = getattr(module, name, None)
        if not callable(function):
            what = "no such function" if function is None else f"{name} cannot be called"
            raise ConfigError(f"{option}: {what} in {source}")
        return function

    def _file(self, path: str, option: str) -> ModuleType:
        file = Path(path).resolve()
        if file not in self._modules:
            if not file.is_file():
                raise ConfigError(f"{option}: {path} is no file")
            try:
                self._modules[file] = run_file(file)
            except UserCodeError as error:
                raise ConfigError(f"{option}: {error}") from error
        return self._modules[file]


def _imported(name: str, option: str) -> ModuleType:
    make_importable(Path.cwd())
    try:
        return import_module(name)
    except UserCodeError as error:
        raise ConfigError(f"{option}: {error}") from error
