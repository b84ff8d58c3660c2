"""Whether a model's weights fit into the memory of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.cli import gpus
from rollout.cli.sizing import gib, is_quantized, model_size, stored_bytes
from rollout.config import RayPlacement
from rollout.config.placements import gpus_of
from rollout.plurals import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.config import RolloutConfig
    from rollout.config.engines import ModelRoom

_CPUINFO = Path("/proc/cpuinfo")
#: The control group of this process, as a container shows it.
_CGROUP = Path("/sys/fs/cgroup")
#: Of CPUs that compute in bfloat16, in which the embedded engine then holds its weights.
_BFLOAT16 = ("avx512_bf16", "amx_tile")


def memory_faults(config: RolloutConfig, *, asks: bool) -> Iterator[str]:
    """Weights that exceed what this machine has for them, where engines run on it.

    Args:
        asks: Ask the engines' interpreter for the memory of its GPUs, which takes seconds.
    """
    place, room, replicas = config.placement, config.engine.model_room(), config.engine.replicas
    if room is None:
        return
    if isinstance(place, RayPlacement) and not gpus.is_started_here(place):
        return
    weights = _weights(config)
    if weights is None:
        return
    if room.device.startswith("cpu"):
        parts, times, why = 1, replicas, " (engine.replicas)"
        present, where = total_bytes(), "this machine has"
    else:
        found = gpus.gpu_memory(getattr(place, "python", None)) if asks else []
        used, parts, times, why = _find_load(config, room, found)
        if not used:
            return
        fraction = room.memory_fraction
        present, where = int(min(used) * fraction), "its GPU has"
        if fraction != 1.0:
            where = f"engine.memory_fraction = {fraction:g} of {gib(min(used))} of its GPU is"
    needed = weights // parts * times
    if needed <= present:
        return
    share = (f" ÷ {parts} GPUs" if parts > 1 else "") + (f" × {times}{why}" if times > 1 else "")
    takes = gib(weights) + (f"{share} = {gib(needed)}" if share else "")
    larger = "a larger engine.tensor_parallel" if room.spreads else ""
    is_shared = needed > present >= weights // parts
    remedy = "fewer engine.replicas" if is_shared else larger or "a smaller model"
    yield (
        f"model.path = {config.model.path!r}: its weights take {takes}, {where} {gib(present)}; "
        f"expected {remedy}, or more memory"
    )


def batch_fault(config: RolloutConfig, rows: int = 1) -> str | None:
    """A batch that this machine cannot hold, by its padded ids alone; None where it may."""
    width, present = config.lengths.prompt + config.lengths.response, total_bytes()
    needed = 8 * rows * width
    if needed <= present:
        return None
    return (
        f"lengths.prompt + lengths.response = {width}: a batch of {count(rows, 'trajectory')} is "
        f"padded to that, its ids take {gib(needed)}, this machine has {gib(present)}; expected "
        "less"
    )


def _find_load(
    config: RolloutConfig, room: ModelRoom, found: list[int]
) -> tuple[list[int], int, int, str]:
    """The GPUs that are used, shards of a replica, replicas on a GPU, and why these share it."""
    place, replicas, parts = config.placement, config.engine.replicas, room.tensor_parallel
    if isinstance(place, RayPlacement):
        share = gpus_of(config.engine, place) / parts
        times = min(replicas, int(1 / share)) if 0 < share < 1 else 1
        return found, parts, times, " (1 / placement.gpus_per_replica)"
    if room.spreads:
        return found[: parts * replicas], parts, 1, ""
    index = room.device.partition(":")[2] or "0"
    used = found[int(index) :][:1] if index.isdigit() else []
    return used, parts, replicas, " (engine.replicas)"


def _weights(config: RolloutConfig) -> int | None:
    """Bytes of a replica's weights as its engine holds them; None where that is not known."""
    room, stored, size = config.engine.model_room(), stored_bytes(config), model_size(config)
    dtype = "auto" if room is None else room.dtype
    is_as_stored = dtype == "auto" and (room is None or room.is_auto_stored)
    if stored is not None and (is_as_stored or is_quantized(config)):
        return stored
    if size is None or size.facts.parameters is None:
        return stored
    bytes_each = 2 if dtype == "auto" and _computes_in_bfloat16() else size.bytes_each
    return size.facts.parameters * bytes_each


def _computes_in_bfloat16() -> bool:
    """Whether this CPU does; assumed where it does not say."""
    try:
        flags = _CPUINFO.read_text().split()
    except OSError:
        return True
    return any(name in flags for name in _BFLOAT16)


def total_bytes() -> int:
    """The memory of this machine, or of a container with less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int((_CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):  # there is no container, or no limit ("max")
        return machine
