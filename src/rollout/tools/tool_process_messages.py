"""What crosses the pipe to the process of an isolated tool, and how it finds its function."""

from __future__ import annotations

import inspect
import os
import struct
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import ToolError

if TYPE_CHECKING:
    from collections.abc import Callable

#: Before each msgpack object in either direction.
LENGTH = struct.Struct("<I")


class FunctionRef(msgspec.Struct, frozen=True):
    """Where a function is found: in a module, or in a file that is run once.

    Attributes:
        module: Importable name; empty where there is a file.
        file: Path of a Python file.
        qualname: The function within it.
    """

    module: str
    file: str
    qualname: str


class Request(msgspec.Struct):
    """One call."""

    function: FunctionRef
    name: str
    arguments: dict[str, Any]


class Reply(msgspec.Struct, omit_defaults=True):
    """What came of it: the fields of a result, or what was raised.

    Attributes:
        failure: What was raised, in words; empty where nothing was.
        is_transient: Whether the tool's policy calls that transient.
    """

    text: str = ""
    data: Any = None
    reward: float | None = None
    metrics: dict[str, Any] = {}
    is_error: bool = False
    end_trajectory: bool = False
    extra: dict[str, Any] = {}
    failure: str = ""
    is_transient: bool = False


def function_ref(function: Callable[..., Any], tool: str) -> FunctionRef:
    """Where a child process finds a function.

    Raises:
        ToolError: It is not at the top level of a module or of a file.
    """
    name = f"function tool {tool!r}: isolation = 'process'"
    if "<" in function.__qualname__ or inspect.ismethod(function):
        raise ToolError(
            f"{name} needs a function that its process can import: move {function.__qualname__} to "
            f"the top level of a module"
        )
    module = function.__globals__
    is_importable = function.__module__ != "__main__" and module.get("__spec__")
    file = module.get("__file__")
    if not is_importable and not file:
        raise ToolError(f"{name} needs a file to import the function from: write it into a module")
    return FunctionRef(
        module=function.__module__ if is_importable else "",
        file="" if is_importable else os.path.abspath(str(file)),
        qualname=function.__qualname__,
    )
