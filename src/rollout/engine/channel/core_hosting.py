"""The core of an engine in the process that hosts it: found, operated and watched.

Loaded in engine processes: imports anyio and msgspec only.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from rollout.engine.channel.messages import (
    DropWeights,
    FlushCache,
    LoadWeights,
    Operation,
    ReceiveWeights,
    Sleep,
    WakeUp,
)
from rollout.engine.core import EngineBroken
from rollout.engine.weights import PREFIX, unstage
from rollout.errors import EngineError
from rollout.user_code import importing

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


async def carry_out(core: Any, operation: Operation) -> str:
    """Have `core` do it; returns the result.

    Raises:
        EngineError: It cannot; or whatever it raises.
    """
    match operation:
        case LoadWeights(version, source):
            update = _find_method(core, "update_weights")
            try:
                await update(version, source)
            except (EngineError, EngineBroken, OSError):
                raise
            except Exception as error:  # of no kind that says whether the old weights stayed
                raise EngineBroken(f"{type(error).__name__}: {error}") from error
        case ReceiveWeights(sent):
            _find_method(core, "update_weights")
            from rollout.engine.weight_broadcasting import receive_weights  # torch

            device = core.info.device or "cuda"
            return await to_thread.run_sync(receive_weights, sent, device, abandon_on_cancel=True)
        case DropWeights(path):
            if not Path(path).name.startswith(PREFIX):
                raise EngineError(f"{path} is no directory of received weights")
            await to_thread.run_sync(unstage, path)
        case Sleep(level):
            await _find_method(core, "sleep")(level)
        case WakeUp(tags):
            await _find_method(core, "wake_up")(tags)
        case FlushCache():
            await _find_method(core, "flush_cache")()
    return ""


def _find_method(core: Any, name: str) -> Any:
    """A method that a core inherits from `BaseCore`, or may lack."""
    method = getattr(core, name, None)
    if method is None:
        raise EngineError(f"{type(core).__name__} has no method {name}")
    return method


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
