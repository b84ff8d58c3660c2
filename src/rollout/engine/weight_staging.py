"""Tensors of the driver's process, put where the engines of its node can read them.

They become a sharded checkpoint in shared memory: what any engine loads from a disk it loads from
there too, a file at a time, and only its path travels.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollout.engine.weights import TensorWeights

PREFIX = "rollout-weights-"
INDEX = "model.safetensors.index.json"


def stage(weights: TensorWeights) -> str:
    """Write the tensors into a directory of their own; blocks while it copies."""
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


def is_staged(path: str) -> bool:
    """Whether `stage` made it."""
    return Path(path).name.startswith(PREFIX)


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
    for name, tensor in _items(weights.tensors):
        count = tensor.numel() * tensor.element_size()
        if bucket and size + count > weights.bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        # A copy: tensors that share memory are refused, and the caller may keep changing its own.
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += count
    if bucket:
        yield bucket


def _items(tensors: Any) -> Iterator[tuple[str, Any]]:
    named: Mapping[str, Any] | None = tensors if hasattr(tensors, "items") else None
    return iter(named.items() if named is not None else tensors)
