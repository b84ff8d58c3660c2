"""Where new weights come from, and what becomes of the requests that run meanwhile.

Loaded in engine processes: imports msgspec only.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import msgspec

from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: A directory in memory.
SHARED = "/dev/shm"
PREFIX = "rollout-weights-"
INDEX = "model.safetensors.index.json"
UpdateMode = Literal["wait", "abort_and_resume", "in_place"]
UPDATE_MODES: tuple[str, ...] = get_args(UpdateMode)


class DiskWeights(msgspec.Struct, frozen=True, array_like=True, tag="disk"):
    """A directory that every engine can read, with the model's safetensors and its configuration.

    It must stay there as long as these weights are the current ones: a replica that is
    restarted reads them from it.
    """

    kind: ClassVar = "disk"
    path: str

    def __post_init__(self) -> None:
        if isinstance(self.path, os.PathLike):
            msgspec.structs.force_setattr(self, "path", os.fspath(self.path))


class DistributedWeights(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="distributed"
):
    """Tensors that a trainer's process broadcasts to the engines.

    `rollout.engine.weight_broadcasting` makes one, and sends them.

    They are sent once: a replica that starts later waits for the next weights.

    Attributes:
        world_size: The replicas, and one for the sender.
        backend: "gloo" goes over CPUs; "nccl" from GPU to GPU, of which each replica and the sender
            have one of their own.
        dtypes: By torch's names, "bfloat16" for example.
        directory: Where the files go that engines load them from, once on each machine; one in
            memory, or on a disk.
        rank, is_kept: The driver sets them, for each replica: its place in the group, and whether
            it writes what it receives down for all of its machine.
    """

    kind: ClassVar = "groups"
    host: str
    port: int
    world_size: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rank: int = 0
    backend: Literal["gloo", "nccl"] = "gloo"
    directory: str = SHARED
    is_kept: bool = True


class TensorWeights:
    """Tensors in the memory of the driver's process, by the names that checkpoints use.

    They are copied into shared memory, in files of at most `bucket_bytes` (a larger tensor has one
    of its own), from which engines on the same node load them one file after the other. The files
    stay as long as these weights are the current ones, so that a replica that is restarted
    finds them, and are then removed: there must be room for one copy of the model, two while it
    is replaced. The tensors themselves are not needed any more once `update_weights` returns.

    Args:
        tensors: Names and `torch.Tensor`s, on any device; an iterable is gone through once.
        directory: Where the files go; one in memory.
    """

    kind: ClassVar = "tensors"

    def __init__(
        self,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
        *,
        bucket_bytes: int = 512 * 1024 * 1024,
        directory: str = SHARED,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes = {bucket_bytes}; expected at least 1")
        self.tensors = tensors
        self.bucket_bytes = bucket_bytes
        self.directory = directory


#: What `update_weights` takes.
WeightSource = DiskWeights | TensorWeights | DistributedWeights


def stage(weights: TensorWeights) -> str:
    """Write the tensors into a directory of their own, as a sharded checkpoint.

    What any engine loads from a disk it loads from there too. Blocks while it copies.
    """
    from safetensors.torch import save_file  # torch; a caller with tensors has loaded it

    remove_orphans(weights.directory)
    try:
        owner = f"{PREFIX}{_find_namespace()}-{os.getpid()}-"
        path = Path(tempfile.mkdtemp(prefix=owner, dir=weights.directory))
    except OSError as error:
        raise EngineError(f"no weights can be staged in {weights.directory}: {error}") from error
    try:
        homes: dict[str, str] = {}
        for number, bucket in enumerate(_buckets(weights)):
            name = f"model-{number:05d}.safetensors"
            save_file(bucket, path / name, metadata={"format": "pt"})
            homes.update(dict.fromkeys(bucket, name))
        if not homes:
            raise EngineError("TensorWeights: expected at least one tensor")
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    except BaseException as error:
        unstage(str(path))
        if isinstance(error, EngineError) or not isinstance(error, Exception):
            raise
        raise EngineError(
            f"the weights cannot be staged in {weights.directory}: {type(error).__name__}: {error}"
        ) from error
    return str(path)


def unstage(path: str) -> None:
    """Remove a staged directory; an engine that has a file of it open keeps that file."""
    shutil.rmtree(path, ignore_errors=True)


def remove_orphans(directory: str) -> None:
    """Remove what processes left that were killed.

    Only those of our own pid namespace: containers may share the directory, and number their
    processes each for itself.
    """
    owner = f"{PREFIX}{_find_namespace()}-"
    for path in Path(directory).glob(f"{owner}*-*"):
        pid = path.name.removeprefix(owner).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            unstage(str(path))


def _find_namespace() -> int:
    """The inode of this process's pid namespace; 0 where the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _buckets(weights: TensorWeights) -> Iterator[dict[str, Any]]:
    """Copies on the CPU, a file's worth at a time."""
    bucket: dict[str, Any] = {}
    size = 0
    tensors: Any = weights.tensors
    for name, tensor in tensors.items() if hasattr(tensors, "items") else tensors:
        count = tensor.numel() * tensor.element_size()
        if bucket and size + count > weights.bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        # A copy: tensors that share memory are refused, and the caller may keep changing its own.
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += count
    if bucket:
        yield bucket
