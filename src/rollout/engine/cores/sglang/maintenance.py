"""Weights and memory of a running SGLang; beside `adapter` the one module that knows its API.

Everything is awaited on SGLang's own event loop.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from rollout.engine.core import EngineBroken
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

#: Poll interval while the schedulers are not idle.
IDLE_S = 0.02
#: Output embeddings: checkpoints leave them out where they are tied to the input ones.
TIED = frozenset({"lm_head.weight"})


class SGLangMaintenance:
    """Changes the weights of an engine and releases its memory.

    Attributes:
        names_versions: Final answers name the weights that sampled each token: from 0.5.20 on.
    """

    def __init__(self, tokens: Any) -> None:
        from sglang.srt.managers import io_struct

        self._tokens = tokens
        self._types = io_struct
        self.names_versions = hasattr(io_struct, "WeightVersionSpans")

    async def load_from_disk(self, path: str, version: int) -> None:
        """Load the safetensors of a directory; requests pause meanwhile and then continue."""
        async with self._paused():
            request = self._request(
                "UpdateWeightFromDiskReqInput",
                model_path=path,
                weight_version=str(version),
                flush_cache=False,  # what the old weights computed is salted, and may be in use
            )
            try:
                is_done, message, *_ = await self._tokens.update_weights_from_disk(request)
            except Exception as error:
                is_done, message = False, f"{type(error).__name__}: {error}"
        if not is_done:
            raise EngineBroken(f"SGLang did not load {path}: {message}")

    async def flush_cache(self) -> None:
        """Forget all prefixes; returns once no request runs and it is done."""
        while True:
            answer = await self._tokens.flush_cache()
            if answer.success:
                return
            await anyio.sleep(IDLE_S)

    async def release(self, tags: tuple[str, ...]) -> None:
        """Release memory; returns when no request runs and it is released."""
        await self.flush_cache()  # SGLang dies of a release while requests run
        request = self._request("ReleaseMemoryOccupationReqInput", tags=list(tags))
        await self._tokens.release_memory_occupation(request)

    async def resume(self, tags: tuple[str, ...]) -> None:
        """Take memory back; weights that were released are garbage until others are loaded."""
        request = self._request("ResumeMemoryOccupationReqInput", tags=list(tags))
        await self._tokens.resume_memory_occupation(request)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Requests stand where they are, with what was computed of them."""
        pause = self._request("PauseGenerationReqInput", mode="in_place")
        await self._tokens.pause_generation(pause)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                resume = self._request("ContinueGenerationReqInput")
                await self._tokens.continue_generation(resume)

    def _request(self, name: str, **fields: Any) -> Any:
        """A request of SGLang's, without the fields that this version does not have."""
        cls = getattr(self._types, name)
        known = list_fields(cls)
        return cls(**{field: value for field, value in fields.items() if field in known})


def list_fields(cls: Any) -> frozenset[str]:
    """The field names of a dataclass or of a msgspec Struct: versions use either."""
    if dataclasses.is_dataclass(cls):
        return frozenset(field.name for field in dataclasses.fields(cls))
    return frozenset(cls.__struct_fields__)


def tensor_shapes(directory: str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name."""
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise EngineError(f"{directory}: expected a directory with safetensors")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes.update(_header(file))
    return shapes


def check_checkpoint(directory: str, reference: str) -> None:
    """Check that a directory holds other weights of the same model as `reference`.

    A reference that is no directory (a hub name) allows no comparison.
    """
    found = tensor_shapes(directory)
    if not Path(reference).is_dir():
        return
    expected = tensor_shapes(reference)
    for name in sorted((expected.keys() ^ found.keys()) - TIED):
        what = "is missing" if name in expected else "is not of this model"
        raise EngineError(f"{directory}: the tensor {name} {what}")
    for name in sorted(expected.keys() & found.keys()):
        if expected[name] != found[name]:
            raise EngineError(
                f"{directory}: {name} has shape {list(found[name])}; expected "
                f"{list(expected[name])}"
            )


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """``u64 length | JSON``: name to dtype, shape and place; and the data must all be there."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        is_whole = file.stat().st_size == 8 + length + end
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise EngineError(f"{file} is no safetensors file: {error}") from error
    if not is_whole:
        raise EngineError(f"{file} is not whole: {file.stat().st_size} of {8 + length + end} bytes")
    return shapes
