"""GPUs that another job holds already, such as a trainer's, and that engines are to share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from rollout.engine.placement.ray_cluster import find_gpu_ids, import_ray
from rollout.errors import EngineError

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


def gpu_slots_of(workers: Sequence[Any], gpus_per_replica: int = 1) -> tuple[str, ...]:
    """The GPUs of a trainer's workers, for `RayPlacement(colocate=...)`, in their order.

    Args:
        workers: Handles of Ray actors with one GPU each. Blocks until each has answered.
        gpus_per_replica: So many workers next to each other make the GPUs of one replica, or of
            its part on one machine: `engine.tensor_parallel`, as a rule.

    Raises:
        EngineError: The workers do not divide into replicas, or a replica's are on several
            machines.
    """
    if len(workers) % gpus_per_replica:
        raise EngineError(
            f"{len(workers)} workers; expected a multiple of gpus_per_replica = {gpus_per_replica}"
        )
    ray = import_ray()

    def locate(worker: object) -> str:
        return f"{ray.get_runtime_context().get_node_id()}:{find_gpu_ids(worker)}"

    texts = ray.get([worker.__ray_call__.remote(locate) for worker in workers])
    slots = [GpuSlot.parse(text) for text in texts]
    found = []
    for start in range(0, len(slots), gpus_per_replica):
        parts = slots[start : start + gpus_per_replica]
        if len({part.node for part in parts}) > 1:
            last = start + gpus_per_replica - 1
            raise EngineError(f"workers {start} to {last} are on several machines; expected one")
        found.append(f"{parts[0].node}:{','.join(part.gpu_ids for part in parts)}")
    return tuple(found)
