"""The code of users: loaded by its files and modules, and found again by another process."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import re
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import ConfigError, RolloutError
from rollout.types import read_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    try:
        if not source.endswith(".py"):
            make_importable(Path.cwd())
            found: Any = import_module(source)
        elif os.path.isfile(source):
            found = run_file(Path(source).resolve())
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
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        logger.info("%s", "".join(traceback.format_exception(error)))
        lines = [
            line
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename == source
        ]
        place = f"line {lines[-1]}: " if lines else ""
        text = " ".join(read_message(error).split())
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


class NotImportableError(Exception):
    """Another process cannot find or import a function; says why, or what to do about it."""


#: The modules and files that this process imports only for what they define, the innermost last.
_imports: list[str] = []


def refuse_while_imported(what: str) -> None:
    """Let a module start work, unless this process imports it only for what it defines.

    Raises:
        RolloutError: It does; the work belongs to the process that runs the module as a script.
    """
    if _imports:
        raise RolloutError(
            f"{what}: {_imports[-1]} is imported by a process that needs only what it defines, "
            "and would start everything once more; put what the script starts under "
            '`if __name__ == "__main__":`'
        )


@contextmanager
def importing(source: str) -> Iterator[None]:
    """Have the block's import refused what `refuse_while_imported` says."""
    _imports.append(source)
    try:
        yield
    finally:
        _imports.pop()


class FunctionRef(msgspec.Struct, frozen=True):
    """Where a function is found: in a module, or in a file that is run once.

    Attributes:
        module: Importable name; empty where there is only a file.
        file: Path of a Python file; counts where no module of that name can be found.
        qualname: The function within it.
    """

    module: str
    file: str
    qualname: str

    def __str__(self) -> str:
        """For messages: the function and its file or module."""
        return f"{self.qualname} of {self.file or self.module}"


def describe_function(function: Any) -> str:
    """A function by its module, name and line; anything else as it shows itself."""
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", None)
    if code is None or name is None:
        return re.sub(" at 0x[0-9a-fA-F]+", "", f"{function!r:.200}")
    home = function.__module__.removeprefix("rollout file ")  # see `run_file`
    return f"{name} ({home}, line {code.co_firstlineno})"


def check_top_level(function: Callable[..., Any]) -> None:
    """Let a function pass that may be at the top level of a module or of a file.

    Raises:
        NotImportableError: It cannot be.
    """
    if not inspect.isfunction(function) or "<" in function.__qualname__:
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        raise NotImportableError(
            f"needs a function that its process can import: move {name} to the top level of a "
            "module"
        )


def function_ref(
    function: Callable[..., Any], is_it: Callable[[Any], bool] | None = None
) -> FunctionRef:
    """Where another process finds a function.

    Args:
        function: The function; its module has been run.
        is_it: Whether what its name leads to stands for it; None: only the function itself does.

    Raises:
        NotImportableError: It is not at the top level of a module or of a file, or its name leads
            to something else there.
    """
    check_top_level(function)
    module = sys.modules.get(function.__module__)
    home = function.__globals__ if module is None else vars(module)
    first, *others = function.__qualname__.split(".")
    found = functools.reduce(lambda one, part: getattr(one, part, None), others, home.get(first))
    if found is not function if is_it is None else not is_it(found):
        raise NotImportableError(
            "needs a function that its process finds by its name: "
            f"{function.__module__}.{function.__qualname__} leads to {describe_function(found)}; "
            "set __qualname__ of the one that is meant to the name under which its module has it"
        )
    spec, file = home.get("__spec__"), home.get("__file__")
    name = "" if module is None or spec is None or spec.name == "__main__" else str(spec.name)
    if not (name or file):
        raise NotImportableError("needs a file to import the function from: write it into a module")
    return FunctionRef(name, os.path.abspath(file) if file else "", function.__qualname__)


@functools.cache
def function_at(ref: FunctionRef) -> Any:
    """What is found there; its module is imported, or its file run, once.

    Raises:
        Exception: Whatever that raises; AttributeError where there is no such name.
    """
    return functools.reduce(getattr, ref.qualname.split("."), _import_home(ref.module, ref.file))


@functools.cache
def _import_home(module: str, file: str) -> Any:
    with importing(file or module):
        try:
            if module:
                return importlib.import_module(module)
        except ModuleNotFoundError as error:
            is_itself = error.name is not None and f"{module}.".startswith(f"{error.name}.")
            if not file or not is_itself:
                raise
        return run_file(Path(file))
