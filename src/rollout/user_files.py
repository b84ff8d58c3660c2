"""Running the Python files that users name, as ``python file.py`` would."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger("rollout")


class UserCodeError(Exception):
    """A file or module of a user's raised while it was loaded; says what, and in which line."""


def run_file(file: Path) -> ModuleType:
    """The module that a file makes when it is run; its directory becomes importable.

    Raises:
        UserCodeError: It raised.
    """
    return _loaded(str(file), lambda: _executed(file))


def import_module(name: str) -> ModuleType:
    """An importable module.

    Raises:
        UserCodeError: There is none, or it raised.
    """
    return _loaded(name, lambda: importlib.import_module(name))


def make_importable(directory: Path) -> None:
    """Let imports find the modules of a directory, after all others."""
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def _loaded(source: str, load: Callable[[], ModuleType]) -> ModuleType:
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


def _executed(file: Path) -> ModuleType:
    make_importable(file.parent)
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
