"""Operations of an engine beside generating: weights and memory.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

from typing import Any

import msgspec
from anyio import to_thread

from rollout.engine.core import ALL_TAGS as ALL_TAGS
from rollout.engine.core import TAGS_OF_LEVEL as TAGS_OF_LEVEL
from rollout.engine.core import EngineBroken
from rollout.engine.weights import DiskWeights, DistributedWeights
from rollout.errors import EngineError


class LoadWeights(msgspec.Struct, frozen=True, array_like=True, tag="load_weights"):
    """Load other weights; what is sampled from then on has this version."""

    version: int
    source: DiskWeights


class ReceiveWeights(msgspec.Struct, frozen=True, array_like=True, tag="receive_weights"):
    """Join a broadcast; the result is the directory of what came, or empty."""

    source: DistributedWeights


class DropWeights(msgspec.Struct, frozen=True, array_like=True, tag="drop_weights"):
    """Remove a directory that came of `ReceiveWeights`."""

    path: str


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    """Release memory; see `BaseCore.sleep`."""

    level: int


class WakeUp(msgspec.Struct, frozen=True, array_like=True, tag="wake_up"):
    """Take memory back; see `BaseCore.wake_up`."""

    tags: tuple[str, ...]


class FlushCache(msgspec.Struct, frozen=True, array_like=True, tag="flush_cache"):
    """Forget what was computed of earlier requests."""


Operation = LoadWeights | ReceiveWeights | DropWeights | Sleep | WakeUp | FlushCache


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
            return await _receive(core, sent)
        case DropWeights(path):
            await to_thread.run_sync(_drop, path)
        case Sleep(level):
            await _find_method(core, "sleep")(level)
        case WakeUp(tags):
            await _find_method(core, "wake_up")(tags)
        case FlushCache():
            await _find_method(core, "flush_cache")()
    return ""


async def _receive(core: Any, sent: DistributedWeights) -> str:
    _find_method(core, "update_weights")
    from rollout.engine.weight_broadcasting import receive_weights  # torch

    device = core.info.device or "cuda"
    return await to_thread.run_sync(receive_weights, sent, device, abandon_on_cancel=True)


def _drop(path: str) -> None:
    from rollout.engine.weight_staging import is_staged, unstage

    if not is_staged(path):
        raise EngineError(f"{path} is no directory of received weights")
    unstage(path)


def _find_method(core: Any, name: str) -> Any:
    """A method that a core inherits from `BaseCore`, or may lack."""
    method = getattr(core, name, None)
    if method is None:
        raise EngineError(f"{type(core).__name__} has no method {name}")
    return method
