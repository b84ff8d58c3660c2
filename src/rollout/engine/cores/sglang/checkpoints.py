"""Checkpoints, looked at before an engine loads them: by their headers alone. No SGLang here."""

from __future__ import annotations

import json
from pathlib import Path

from rollout.errors import EngineError

#: Output embeddings: checkpoints leave them out where they are tied to the input ones.
TIED = frozenset({"lm_head.weight"})


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
