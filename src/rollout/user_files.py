"""The one place where the Python files and modules that users name are loaded."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("rollout")


class UserCodeError(Exception):
    """A file or module of a user's raised while it was loaded; says what, and in which line."""


def run_file(file: Path) -> ModuleType:
    """The module that a file makes when it is run; its directory becomes importable.

    Raises:
        UserCodeError: It raised.
    """
    with _explain_failure(str(file)):
        make_importable(file.parent)
        return execute(file, f"rollout file {file}")


def import_module(name: str) -> ModuleType:
    """An importable module.

    Raises:
        UserCodeError: There is none, or it raised.
    """
    with _explain_failure(name):
        return importlib.import_module(name)


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
    file = Path(source).resolve()
    try:
        if not source.endswith(".py"):
            make_importable(Path.cwd())
            found: Any = import_module(source)
        elif file.is_file():
            found = run_file(file)
        else:
            raise ConfigError(f"{where} = {reference!r}: {source} is no file")
    except UserCodeError as error:
        raise ConfigError(f"{where} = {reference!r}: {error}") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise ConfigError(f"{where} = {reference!r}: {source} has no {name!r}; {expected}")
    return found


def make_importable(directory: Path) -> None:
    """Let imports find the modules of a directory, after all others."""
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


@contextmanager
def _explain_failure(source: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        logger.info("%s", "".join(traceback.format_exception(error)))
        lines = [
            line
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename == source
        ]
        place = f"line {lines[-1]}: " if lines else ""
        text = " ".join(str(error).split())
        raise UserCodeError(f"{place}{type(error).__name__}: {text}") from error


def execute(file: Path, name: str) -> ModuleType:
    """Run a file as the module called `name`; what it raises passes.

    `sys.modules` knows the module, as in `importlib`'s own recipe: dataclasses and type hints look
    it up there. With a space in its name no import can have it.
    """
    # Compiled here and not by an importer, which would leave bytecode beside the file, and whose
    # cache of bytecode can miss a quick edit.
    code = compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module
    exec(code, vars(module))
    return module
