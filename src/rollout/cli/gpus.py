"""The GPUs of this machine, and whether a configuration asks for others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.config import LocalProcessPlacement, RayPlacement
from rollout.config.placements import gpus_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.config import RolloutConfig
    from rollout.config.engines import ModelRoom

#: One of these is there where a driver of a GPU is: NVIDIA's, of Jetson, of WSL, AMD's.
_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
#: Ray notes here what runs on this machine.
_RAY_CLUSTER = "/tmp/ray/ray_current_cluster"
_COUNT = "import torch; print(torch.cuda.device_count())"
_MEMORY = (
    "import torch; "
    "gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count())); "
    "print(*(gpu.total_memory for gpu in gpus))"
)
#: Importing torch takes seconds, on a busy machine many.
_PATIENCE_S = 120.0


def has_driver() -> bool:
    """Whether there is a driver of a GPU on this machine."""
    return any(Path(path).exists() for path in _DRIVERS)


def count_gpus(python: str | None) -> int | None:
    """GPUs of this machine that torch sees in an interpreter; None where it cannot be asked.

    Where there is no driver, nothing is asked.
    """
    if not has_driver():
        return 0
    try:
        return int(_printed(python, _COUNT))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def gpu_memory(python: str | None) -> list[int]:
    """Bytes of each GPU of this machine, as `count_gpus` asks; none where it cannot be asked."""
    try:
        return [*map(int, _printed(python, _MEMORY).split())] if has_driver() else []
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _printed(python: str | None, program: str) -> str:
    return subprocess.run(
        [python or sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=True,
    ).stdout


def gpu_faults(config: RolloutConfig, *, asks: bool) -> Iterator[str]:
    """GPUs that the engines need on this machine and that are not here.

    Args:
        asks: Ask their interpreter, which takes seconds, and not just whether there is a driver.
    """
    engine, place = config.engine, config.placement
    room = engine.model_room()
    if room is None or not room.is_on_gpu:
        return
    where = f"engine.device = {room.device!r}"
    if isinstance(place, RayPlacement):
        if not is_started_here(place):
            return
        needed, why = gpus_of(engine, place) * engine.replicas, " for a Ray cluster started here"
    elif isinstance(place, LocalProcessPlacement):
        needed, why = _count_used(room, engine.replicas), ""
    else:
        return
    found = count_gpus(getattr(place, "python", None)) if asks or not has_driver() else None
    if found is None or found >= needed:
        return
    there_is = "there is none" if found == 0 else f"there are {found}"
    yield f"{where}: expected {_count(needed)} on this machine{why}; {there_is}"


def _count_used(room: ModelRoom, replicas: int) -> float:
    if room.spreads:
        return replicas * room.tensor_parallel
    index = room.device.partition(":")[2]  # replicas share the one that is named
    return int(index) + 1 if index.isdigit() else 1


def is_started_here(place: RayPlacement) -> bool:
    """Whether there is no cluster to join, so that one would be started on this machine."""
    if place.colocate:
        return False
    is_known = bool(os.environ.get("RAY_ADDRESS")) or Path(_RAY_CLUSTER).exists()
    return place.address == "local" or (place.address is None and not is_known)


def _count(number: float) -> str:
    return "a GPU" if number == 1 else f"{number:g} GPUs"
