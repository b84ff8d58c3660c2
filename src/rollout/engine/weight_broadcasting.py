"""Weights over a process group: a trainer's process sends, engines receive. Gloo or NCCL.

Each change has a group of its own: rank 0 is the sender, and the driver gives the replicas theirs.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from rollout.engine.weights import SHARED, DistributedWeights, TensorWeights, stage
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: Joining the group, and each tensor's way, may take this long.
GROUP_S = 120.0
#: States of the replicas that receive what is sent.
RECEIVING = ("serving", "waiting")


def describe_tensors(
    tensors: Mapping[str, Any],
    *,
    host: str,
    port: int,
    world_size: int | None = None,
    replicas: Iterable[Any] = (),
    backend: Literal["gloo", "nccl"] = "gloo",
    directory: str = SHARED,
) -> DistributedWeights:
    """What engines must know to receive `tensors`, for `update_weights`.

    Args:
        host: The sender's address, as the engines reach it.
        port: A free port there.
        world_size: The number of replicas that serve, or wait for weights, and one for the
            sender; or None, and they are counted in `replicas`.
        replicas: `runtime.statistics().replicas`.
        backend: "nccl" where sender and engines have a GPU each.
        directory: Where engines put them to load them from; on each machine, one copy of the model.
    """
    if world_size is None:
        world_size = 1 + sum(replica.state in RECEIVING for replica in replicas)
    return DistributedWeights(
        host=host,
        port=port,
        world_size=world_size,
        names=tuple(tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
        backend=backend,
        directory=directory,
    )


def send_weights(tensors: Mapping[str, Any], weights: DistributedWeights) -> None:
    """Broadcast `tensors` to the engines; blocks until all have them.

    Runs in the trainer's process, beside the `update_weights` that has the engines receive.
    """
    group = _join(weights, rank=0)
    for tensor in tensors.values():
        device = "cuda" if weights.backend == "nccl" else "cpu"
        _broadcast(group, _view_bytes(tensor.detach().to(device).contiguous()))
    if weights.backend == "nccl":
        import torch

        torch.cuda.synchronize()  # its broadcasts are only queued


def receive_weights(weights: DistributedWeights, device: str = "cuda") -> str:
    """A directory of files with what was sent, empty where they are not to be kept; blocks.

    Args:
        device: Of the engine, as torch names it: NCCL receives there, Gloo in the memory of the
            host.

    Raises:
        EngineError: The sender or another replica did not come, or was lost; there is no room; or
            NCCL is asked for, and the engine has no GPU.
    """
    if weights.backend == "nccl" and not device.startswith("cuda"):
        raise EngineError(
            f"DistributedWeights: backend = 'nccl', and the engine computes on {device!r}; "
            "expected 'gloo'"
        )
    try:
        group = _join(weights, rank=weights.rank)
        received = _receive_each(group, weights, device if weights.backend == "nccl" else "cpu")
        if weights.is_kept:
            return stage(TensorWeights(received, directory=weights.directory))
        deque(received, maxlen=0)  # each has to be taken: the others wait for it
    except RuntimeError as error:  # what torch raises, its timeouts included
        raise EngineError(f"the weights were not received: {error}") from error
    return ""


def _receive_each(
    group: Any, weights: DistributedWeights, device: str
) -> Iterator[tuple[str, Any]]:
    import torch

    for name, dtype, shape in zip(weights.names, weights.dtypes, weights.shapes, strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        _broadcast(group, _view_bytes(tensor))
        yield name, tensor


def _join(weights: DistributedWeights, rank: int) -> Any:
    import torch.distributed

    dist: Any = torch.distributed
    limit = timedelta(seconds=GROUP_S)
    if weights.backend == "nccl" and not dist.is_nccl_available():
        raise EngineError("DistributedWeights: backend = 'nccl', and this torch has no NCCL")
    store = dist.TCPStore(
        weights.host, weights.port, is_master=rank == 0, timeout=limit, wait_for_workers=False
    )
    if weights.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, weights.world_size, options)
    return dist.ProcessGroupGloo(store, rank, weights.world_size, limit)


def _view_bytes(tensor: Any) -> Any:
    """Its memory; the backends know few types, and all of them are bytes."""
    import torch

    return tensor.view(-1).view(torch.uint8)


def _broadcast(group: Any, data: Any) -> None:
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([data], options).wait()
