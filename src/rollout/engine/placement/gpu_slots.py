"""GPUs that somebody else holds, beside whom engines are to live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from rollout.engine.placement.ray_cluster import gpu_ids_of, import_ray

if TYPE_CHECKING:
    from collections.abc import Sequence


@attrs.frozen
class GpuSlot:
    """GPUs that another placement holds already: `placement.colocate` names one per replica."""

    node: str
    gpu_ids: str

    @classmethod
    def parse(cls, text: str) -> GpuSlot:
        """From ``node:0,1``; the node by its Ray id or its address."""
        node, _, gpu_ids = text.rpartition(":")
        return cls(node, gpu_ids)


def gpu_slots_of(workers: Sequence[Any]) -> tuple[str, ...]:
    """The GPUs of a trainer's workers, for `RayPlacement(colocate=...)`: one replica beside each.

    Args:
        workers: Handles of Ray actors that were given GPUs. Blocks until each has answered.
    """
    ray = import_ray()

    def where(worker: object) -> str:
        return f"{ray.get_runtime_context().get_node_id()}:{gpu_ids_of(worker)}"

    gpu_slots: list[str] = ray.get([worker.__ray_call__.remote(where) for worker in workers])
    return tuple(gpu_slots)
