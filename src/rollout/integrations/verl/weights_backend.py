"""verl's checkpoint engine for engines of ours: its trainer's weights, as files that they load.

verl imports this module in each of its workers (``checkpoint_engine.custom_backend_module``), which
registers the backend ``rollout_disk``.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

BACKEND = "rollout_disk"


def weights_directory(directory: str | Path, step: int) -> Path:
    """Where the weights of a step are."""
    return Path(directory, f"step-{step}")


@CheckpointEngineRegistry.register(BACKEND)
class DiskCheckpointEngine(CheckpointEngine):
    """Writes the weights that a trainer's workers gather; the first worker does, the others help.

    Args:
        bucket_size: Bytes of a file.
        is_master: Whether this is the first worker.
        directory: Which all workers, the driver and the engines see: a shared disk, or memory
            (``/dev/shm``) on one machine.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, *, directory: str | None = None
    ) -> None:
        if not directory:
            raise ValueError(
                f"checkpoint_engine.engine_kwargs.{BACKEND}.directory = {directory!r}: expected a "
                "directory that the trainer's workers and the engines see"
            )
        self._bucket_size, self._is_master = bucket_size, is_master
        self._directory = directory

    def prepare(self) -> dict[str, Any]:
        """Nothing is needed between workers."""
        return {}

    @classmethod
    def build_topology(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Nothing is needed between workers."""
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """Nothing is needed between workers."""

    def finalize(self) -> None:
        """Files stay until newer ones are loaded."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Write them; whole files appear at once, or not at all."""
        if not self._is_master:
            for _ in weights:  # each step of it gathers what the first worker writes
                pass
            return {}
        target = weights_directory(self._directory, global_steps or 0)
        part = target.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write(part, self._buckets(weights))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(part, target)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        """Engines of ours read the files."""
        raise NotImplementedError("engines of rollout load the files themselves")

    def _buckets(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[dict[str, torch.Tensor]]:
        bucket: dict[str, torch.Tensor] = {}
        size = 0
        for name, tensor in weights:
            if bucket and size + tensor.nbytes > self._bucket_size:
                yield bucket
                bucket, size = {}, 0
            # A copy: what was gathered may be freed at the next step, and none may share memory.
            bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += tensor.nbytes
        if bucket:
            yield bucket


def _write(directory: Path, buckets: Iterable[dict[str, torch.Tensor]]) -> None:
    """Files and the index that names the file of each tensor, as transformers writes them."""
    places: dict[str, str] = {}
    size = 0
    for number, bucket in enumerate(buckets):
        name = f"model-{number:05d}.safetensors"
        save_file(bucket, directory / name, metadata={"format": "pt"})
        places |= dict.fromkeys(bucket, name)
        size += sum(tensor.nbytes for tensor in bucket.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
