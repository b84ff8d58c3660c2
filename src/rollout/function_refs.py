"""Names under which another process finds a function of the user's."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class NotImportableError(Exception):
    """Another process cannot find a function; says what to do about it."""


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


def function_ref(function: Callable[..., Any]) -> FunctionRef:
    """Where another process finds a function.

    Raises:
        NotImportableError: It is not at the top level of a module or of a file.
    """
    if not inspect.isfunction(function) or "<" in function.__qualname__:
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        raise NotImportableError(
            f"needs a function that its process can import: move {name} to the top level of a "
            "module"
        )
    home = sys.modules.get(function.__module__)
    # A decorator's wrapper has the globals of the decorator.
    module = function.__globals__ if home is None else vars(home)
    is_importable = function.__module__ != "__main__" and module.get("__spec__")
    file = module.get("__file__")
    if not is_importable and not file:
        raise NotImportableError("needs a file to import the function from: write it into a module")
    return FunctionRef(
        module=function.__module__ if is_importable else "",
        file=os.path.abspath(str(file)) if file else "",
        qualname=function.__qualname__,
    )


@functools.cache
def function_at(ref: FunctionRef) -> Any:
    """What is found there; its module is imported, or its file run, once.

    Raises:
        Exception: Whatever that raises; AttributeError where there is no such name.
    """
    found: Any = _module_of(ref.module, ref.file)
    for part in ref.qualname.split("."):
        found = getattr(found, part)
    return found


@functools.cache
def _module_of(module: str, file: str) -> ModuleType:
    from rollout.user_files import run_file

    try:
        if module:
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        is_itself = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        if not file or not is_itself:
            raise
    return run_file(Path(file))
