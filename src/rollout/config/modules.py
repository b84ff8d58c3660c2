"""Configurations written in Python: modules that set ``config = RolloutConfig(...)``."""

from __future__ import annotations

import importlib
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.config.config_faults import ABSENT, Fault, config_error, got
from rollout.config.section_type import deferred_faults, gather_faults
from rollout.config.sections import RolloutConfig
from rollout.errors import ConfigError
from rollout.types import read_message
from rollout.user_code import execute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType


def read_python_file(path: str) -> tuple[RolloutConfig, list[Fault]]:
    """Run a Python file once and return its ``config``, to be used only without faults.

    Raises:
        ConfigError: The file cannot be read, is not Python, raises, or sets no ``config``.
    """
    name = f"rollout config {path}"
    return _read(path, name, lambda: execute(Path(path), name))


def read_module(name: str) -> tuple[RolloutConfig, list[Fault]]:
    """Import a module, looking in the working directory too, and return its ``config``.

    Raises:
        ConfigError: There is no such module, it raises, or it sets no ``config``.
    """
    return _read(name, name, lambda: importlib.import_module(name))


def config_of_module(module: ModuleType) -> tuple[RolloutConfig, list[Fault]]:
    """The ``config`` of a module that has been imported.

    Raises:
        ConfigError: It sets no ``config``.
    """
    return _read(module.__name__, module.__name__, lambda: module)


def _read(
    source: str, name: str, load: Callable[[], ModuleType]
) -> tuple[RolloutConfig, list[Fault]]:
    """The ``config`` of what `load` returns, with the faults of every section built meanwhile."""
    with deferred_faults() as faulty:
        try:
            with _working_directory_importable():
                config = getattr(load(), "config", ABSENT)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            faults = [*gather_faults(faulty), *_faults_of(error, source, name)]
            raise config_error(f"the configuration {source}", faults) from error
    if isinstance(config, RolloutConfig):
        return config, gather_faults([*faulty, config])
    expected = "expected config = RolloutConfig(...)"
    problem = f"missing; {expected}" if config is ABSENT else f"{expected}{got(config)}"
    faults = [*gather_faults(faulty), Fault("config", problem, config)]
    raise config_error(f"the configuration {source}", faults)


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    """Let ``conf.quickstart`` be found under a console script, whose path lacks the directory."""
    directory = str(Path.cwd())
    is_missing = not {"", directory} & set(sys.path)
    if is_missing:
        sys.path.append(directory)
    try:
        yield
    finally:
        if is_missing and directory in sys.path:
            sys.path.remove(directory)


def _faults_of(error: BaseException, source: str, name: str) -> list[Fault]:
    """What went wrong in the module called `name` or a package above it, at its innermost line."""
    places = [
        f"{frame.f_code.co_filename}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_part(frame.f_globals.get("__name__", ""), name)
    ]
    if not places:
        return [_fault_of_loading(error, source, name)]
    if isinstance(error, ConfigError) and error.faults:  # of a configuration that this one loads
        return [Fault(places[-1], line) for line in error.faults]
    return [Fault(places[-1], _one_line(error))]


def _fault_of_loading(error: BaseException, source: str, name: str) -> Fault:
    """What kept the module called `name` from running at all."""
    if isinstance(error, SyntaxError) and error.filename:
        return Fault(f"{error.filename}, line {error.lineno}", f"not valid Python: {error.msg}")
    if isinstance(error, OSError):
        return Fault(source, f"cannot be read: {error.strerror}")
    if isinstance(error, ModuleNotFoundError) and error.name and _is_part(error.name, name):
        return Fault(source, f"there is no module {error.name!r}")
    return Fault(source, _one_line(error))


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(read_message(error).split())}"


def _is_part(part: str, name: str) -> bool:
    return f"{name}.".startswith(f"{part}.")
