"""The one place where the Python files that users name are run."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("rollout")


class UserCodeError(Exception):
    """A file or module of a user's raised while it was loaded; says what, and in which line."""


def run_file(file: Path) -> ModuleType:
    """The module that a file makes when it is run; its directory becomes importable.

    Raises:
        UserCodeError: It raised.
    """

    def run() -> ModuleType:
        make_importable(file.parent)
        return execute(file, f"rollout file {file}", is_kept=True)

    return _load(str(file), run)


def import_module(name: str) -> ModuleType:
    """An importable module.

    Raises:
        UserCodeError: There is none, or it raised.
    """
    return _load(name, lambda: importlib.import_module(name))


def named_object(
    reference: str, where: str, expected: str = "expected 'package.module:name' or 'file.py:name'"
) -> Any:
    """What a text in a configuration or an argument names; modules of the working directory too.

    Args:
        reference: As `expected` says.
        where: The field or argument that it stands in, for the message.

    Raises:
        ConfigError: It is no such text, its module cannot be loaded, or has nothing of that name.
    """
    source, _, name = reference.rpartition(":")
    if not source or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{where} = {reference!r:.200}: {expected}")
    try:
        found: Any = _load_module(source)
    except (UserCodeError, OSError) as error:
        raise ConfigError(f"{where} = {reference!r}: {error}") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise ConfigError(f"{where} = {reference!r}: {source} has no {name!r}; {expected}")
    return found


def _load_module(source: str) -> ModuleType:
    if not source.endswith(".py"):
        make_importable(Path.cwd())
        return import_module(source)
    file = Path(source).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"{source} is no file")
    return run_file(file)


def make_importable(directory: Path) -> None:
    """Let imports find the modules of a directory, after all others."""
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def _load(source: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except (Exception, SystemExit) as error:
        logger.info("%s", "".join(traceback.format_exception(error)))
        text = " ".join(str(error).split())
        place = _place(error, source)
        raise UserCodeError(f"{place}{type(error).__name__}: {text}") from error


def _place(error: BaseException, source: str) -> str:
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == source
    ]
    return f"line {lines[-1]}: " if lines else ""


def execute(file: Path, name: str, *, is_kept: bool) -> ModuleType:
    """Run a file as the module called `name`; what it raises passes.

    Args:
        name: With a space in it no import can have it.
        is_kept: Whether `sys.modules` knows the module afterwards too, where dataclasses and type
            hints look it up, and not only while it runs.
    """
    # Compiled here and not by an importer, which would leave bytecode beside the file, and whose
    # cache of bytecode can miss a quick edit.
    code = compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module
    is_whole = False
    try:
        exec(code, vars(module))
        is_whole = True
    finally:
        if not (is_kept and is_whole):
            sys.modules.pop(name, None)
    return module
