"""Tools, users and rewards from Python files and modules that a command names."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from rollout.agents.agent_loop import registered_agents
from rollout.errors import ConfigError, ToolError
from rollout.interactions import Interaction
from rollout.scheduling.rewards.functions import check_reward
from rollout.tools.builtin import is_shipped, make_shipped
from rollout.tools.loading import find_tools
from rollout.tools.tool import ToolProvider
from rollout.user_code import UserCodeError, import_module, make_importable, run_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.scheduling.rewards.functions import GroupRewardFunction, RewardFunction
    from rollout.tools import Tool


@attrs.define
class UserCode:
    """Runs each file once, however many options name it.

    A file's directory and the working directory become importable, as they are under
    ``python file.py``; agents that the file registers are known from then on.
    """

    _modules: dict[Path, ModuleType] = attrs.field(factory=dict)
    #: Those that ``--tools`` and ``--agents`` name, in which users are looked for.
    _named: list[ModuleType] = attrs.field(factory=list)

    def tools(self, values: Sequence[str]) -> list[Tool | ToolProvider]:
        """The tools of the files and the shipped tools that values of ``--tools`` name.

        Those of a file are the `Tool` and `ToolSet` objects at its top level, decorated functions
        included.

        Raises:
            ConfigError: A file cannot be read or run, or has none; or two have one of the same
                name.
        """
        found: dict[str, tuple[Tool, str]] = {}
        tools: list[Tool | ToolProvider] = []
        for source in _sources(values):
            for tool in self._tools_of(source):
                if isinstance(tool, ToolProvider):  # its tools' names are known once it is open
                    if tool not in tools:
                        tools.append(tool)
                    continue
                other, where = found.setdefault(tool.name, (tool, source))
                if other is tool and tool in tools:  # imported by another file
                    continue
                if where != source:
                    raise ConfigError(
                        f"--tools {source}: the tool {tool.name!r} is also in {where}; expected "
                        "another name, or one of the two"
                    )
                tools.append(tool)
        return tools

    def run_tool_files(self, values: Sequence[str]) -> None:
        """Run the files that values of ``--tools`` name, for the agents that they register.

        Raises:
            ConfigError: One cannot be read or run.
        """
        for source in _sources(values):
            if not is_shipped(source):
                self._named.append(self._file(source, f"--tools {source}"))

    def agents(self, sources: Sequence[str]) -> None:
        """Have the agents known that files and modules register.

        Raises:
            ConfigError: One cannot be read or run, or registers none.
        """
        for source in sources:
            option, before = f"--agents {source}", registered_agents()
            is_file = source.endswith(".py") or os.path.isfile(source)
            is_known = Path(source).resolve() in self._modules or source in sys.modules
            module = self._file(source, option) if is_file else _imported(source, option)
            if not is_known and registered_agents() == before:
                raise ConfigError(
                    f"{option}: registers no agent; expected functions decorated with "
                    "@rollout.agent, or classes with @rollout.register_agent"
                )
            self._named.append(module)

    def interactions(self) -> list[type[Interaction]]:
        """The named `Interaction` classes that these files define, for `open_rollout`."""
        return [
            value
            for module in {id(each): each for each in self._named}.values()
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, Interaction)
            and value.__module__ == module.__name__
            and hasattr(value, "name")
        ]

    def _tools_of(self, source: str) -> list[Tool | ToolProvider]:
        if is_shipped(source):
            return list(make_shipped([source]))
        option = f"--tools {source}"
        module = self._file(source, option)
        self._named.append(module)
        try:
            return find_tools(module)
        except ToolError as error:
            raise ConfigError(f"{option}: {error}") from error

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
        check_reward(function, option, is_group=True)
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
            if not os.path.isfile(file):
                raise ConfigError(f"{option}: {path} is no file")
            try:
                self._modules[file] = run_file(file)
            except UserCodeError as error:
                raise ConfigError(f"{option}: {error}") from error
        return self._modules[file]


def _sources(values: Sequence[str]) -> list[str]:
    """The files and shipped tools that these values name, each once, in order."""
    sources: dict[Path | str, str] = {}
    for value in values:
        for source in [value] if os.path.isfile(value) else value.split(","):
            sources.setdefault(source if is_shipped(source) else Path(source).resolve(), source)
    return list(sources.values())


def _imported(name: str, option: str) -> ModuleType:
    make_importable(Path.cwd())
    try:
        return import_module(name)
    except UserCodeError as error:
        raise ConfigError(f"{option}: {error}") from error
