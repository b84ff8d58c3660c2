"""Names under which another process finds a function of the user's."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import RolloutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType


class NotImportableError(Exception):
    """Another process cannot find a function; says what to do about it."""


class MainGuardError(RolloutError):
    """A module that a process imports for what it defines starts the work of a script."""


class _Import:
    """A module or file that is imported here for what it defines, and what it was refused."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.refusal: MainGuardError | None = None


#: Imports under way, the innermost last.
_imports: list[_Import] = []


def refuse_while_imported(what: str) -> None:
    """Let a module start work, unless this process imports it only for what it defines.

    Raises:
        MainGuardError: It does; the work belongs to the process that runs the module as a script.
    """
    if _imports:
        current = _imports[-1]
        current.refusal = MainGuardError(
            f"{what}: {current.source} is imported by a process that needs only what it defines, "
            "and would start everything once more; put what the script starts under "
            '`if __name__ == "__main__":`'
        )
        raise current.refusal


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

    @property
    def home(self) -> str:
        """The module or file, for messages."""
        return self.file or self.module


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
    module, qualname = sys.modules.get(function.__module__), function.__qualname__
    home = function.__globals__ if module is None else vars(module)
    first, *others = qualname.split(".")
    found = functools.reduce(lambda one, part: getattr(one, part, None), others, home.get(first))
    if found is not function if is_it is None else not is_it(found):
        raise NotImportableError(
            "needs a function that its process finds by its name: "
            f"{_describe(found, f'{function.__module__}.{qualname}')}; set __qualname__ of the one "
            "that is meant to the name under which its module has it"
        )
    spec, file = home.get("__spec__"), home.get("__file__")
    name = "" if module is None or spec is None or spec.name == "__main__" else str(spec.name)
    if not (name or file):
        raise NotImportableError("needs a file to import the function from: write it into a module")
    return FunctionRef(name, os.path.abspath(file) if file else "", qualname)


def _describe(found: Any, name: str) -> str:
    """What the name of a function leads to in its place."""
    if found is None:
        return f"there is no {name}"
    code = getattr(found, "__code__", None)
    place = "" if code is None else f", of {code.co_filename}, line {code.co_firstlineno}"
    return f"{name} is another {type(found).__qualname__}{place}"


@functools.cache
def function_at(ref: FunctionRef) -> Any:
    """What is found there; its module is imported, or its file run, once.

    Raises:
        Exception: Whatever that raises; AttributeError where there is no such name.
    """
    found: Any = _import_home(ref.module, ref.file)
    for part in ref.qualname.split("."):
        found = getattr(found, part)
    return found


@functools.cache
def _import_home(module: str, file: str) -> ModuleType:
    from rollout.user_files import run_file

    with importing(file or module):
        try:
            if module:
                return importlib.import_module(module)
        except ModuleNotFoundError as error:
            is_itself = error.name is not None and f"{module}.".startswith(f"{error.name}.")
            if not file or not is_itself:
                raise
        return run_file(Path(file))


@contextmanager
def importing(source: str) -> Iterator[None]:
    """Have the block's import refused what `refuse_while_imported` says.

    Raises:
        MainGuardError: The import failed by that, whatever the module made of it.
    """
    entry = _Import(source)
    _imports.append(entry)
    try:
        yield
    except BaseException:
        if entry.refusal is None:
            raise
        # What the module made of it, such as SystemExit, is not to pass for its cause.
        raise entry.refusal from None
    finally:
        _imports.remove(entry)
