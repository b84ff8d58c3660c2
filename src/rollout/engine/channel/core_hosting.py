"""The core of an engine in the process that hosts it: found, watched, and its failures described.

Loaded in engine processes: imports anyio and msgspec only.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

import anyio

from rollout.engine.core import EngineBroken
from rollout.errors import EngineError
from rollout.function_refs import importing

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.engine.core import EngineCore

logger = logging.getLogger("rollout.engine")

#: The answers that a lost core has given to its requests get this long to leave.
LAST_ANSWERS_S = 0.2


def load_core(path: str) -> Callable[..., EngineCore]:
    """Import the class named ``package.module:Class``."""
    module_name, _, class_name = path.partition(":")
    with importing(module_name):
        module = importlib.import_module(module_name)
    core: Callable[..., EngineCore] | None = getattr(module, class_name, None)
    if core is None:
        raise ImportError(f"module {module_name!r} has no class {class_name!r}")
    return core


def describe_error(error: BaseException) -> str:
    """Describe a core's failure for the driver."""
    if isinstance(error, EngineError | EngineBroken):
        return str(error)
    return f"{type(error).__name__}: {error}"


def is_fatal(error: Exception) -> bool:
    """Whether the engine is of no more use after such a failure."""
    return isinstance(error, EngineBroken | MemoryError)


async def watch_core(core: EngineCore, on_lost: Callable[[], object]) -> None:
    """Wait until `core` says that its engine is lost, then call `on_lost`.

    Returns at once for a core that cannot say so.
    """
    watch = getattr(core, "watch", None)
    if watch is None:
        return
    logger.error("the engine is lost: %s", await watch())
    await anyio.sleep(LAST_ANSWERS_S)
    on_lost()
