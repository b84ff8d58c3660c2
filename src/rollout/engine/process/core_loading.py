"""Finds a core by name, and words for one that does not start.

Loaded in engine processes: imports msgspec only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rollout.engine.core import EngineBroken
from rollout.errors import EngineError
from rollout.function_refs import importing

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.engine.core import EngineCore


def load_core(path: str) -> Callable[..., EngineCore]:
    """The class named ``package.module:Class``.

    Raises:
        ImportError: There is no such module or no such class in it.
        MainGuardError: It is a script that starts a runtime when it is imported.
    """
    module_name, _, class_name = path.partition(":")
    with importing(module_name):
        module = importlib.import_module(module_name)
    try:
        core: Callable[..., EngineCore] = getattr(module, class_name)
    except AttributeError:
        raise ImportError(f"module {module_name!r} has no class {class_name!r}") from None
    return core


def start_error_text(error: BaseException) -> str:
    """What a core said when it did not start, for the error that names the replica."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


def told_of(error: Exception) -> tuple[str, bool]:
    """What a client gets to know of a core's failure, and whether the engine is of no more use."""
    if isinstance(error, EngineBroken):
        return str(error), True
    return start_error_text(error), isinstance(error, MemoryError)
