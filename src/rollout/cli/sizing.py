"""What a model asks of GPUs and memory: the arithmetic that ``rollout check`` shows.

Looks at files that are here already, the hub's cache included, and at the figures of public models
that `model_facts` has; loads nothing, asks no network.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from rollout.cli.public_models import PublishedFacts, published_facts
from rollout.config import RayPlacement
from rollout.engine.model_files import EMBEDDED_PREFIX, converted_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.config import RolloutConfig

GIB = 2**30
#: A common size of a GPU's memory, for the example: 80 GB.
EXAMPLE_GPU = 80 * 10**9
#: Of a safetensors file, in bytes, by that format.
LONGEST_HEADER = 100_000_000
_BYTES_OF = {"float32": 4, "float16": 2, "bfloat16": 2}
#: By the names of safetensors.
_BYTES_STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}


@attrs.frozen
class ModelSize:
    """A model's figures, as an engine holds it.

    Attributes:
        facts: Of its files.
        bytes_each: Of a parameter.
        origin: Where the figures come from, for people; empty: from its files.
    """

    facts: PublishedFacts
    bytes_each: int
    origin: str = ""

    @property
    def kv_bytes(self) -> int:
        """Of one token in the KV cache, over all layers."""
        facts = self.facts
        return 2 * facts.layers * facts.kv_heads * facts.head_width * self.bytes_each

    @property
    def kv_text(self) -> str:
        """How those come about."""
        facts = self.facts
        return (
            f"2 × {facts.layers} layers × {facts.kv_heads} heads × {facts.head_width} × "
            f"{self.bytes_each} bytes"
        )


def sizing_lines(config: RolloutConfig) -> list[tuple[str, str]]:
    """Lines ``(label, text)`` on the GPUs and the memory of a configuration's engines."""
    return [*_gpu_lines(config), *_memory_lines(config)]


def _gpu_lines(config: RolloutConfig) -> Iterator[tuple[str, str]]:
    place, room, replicas = config.placement, config.engine.model_room(), config.engine.replicas
    if room is None or not (room.spreads and room.is_on_gpu):
        return
    each = room.tensor_parallel
    if isinstance(place, RayPlacement) and place.colocate:
        yield "gpus", f"none of their own: {replicas} replicas share those of the trainer"
        return
    yield (
        "gpus",
        (
            f"{replicas} × {each} (engine.replicas × engine.tensor_parallel) = "
            f"{replicas * each} GPUs"
        ),
    )


def _memory_lines(config: RolloutConfig) -> Iterator[tuple[str, str]]:
    room = config.engine.model_room()
    if room is None:
        return
    found = model_size(config)
    if found is None:
        yield "memory", "unknown: the model's files are not on this machine"
        return
    shards = room.tensor_parallel
    weights, parameters = 0, found.facts.parameters
    if parameters is not None:
        weights = parameters * found.bytes_each // shards
        split = f" ÷ {shards} GPUs" if shards > 1 else ""
        yield (
            "weights",
            (
                f"{parameters / 1e9:.3g} billion × {found.bytes_each} bytes{split} = "
                f"{gib(weights)} for each replica{' and GPU' if split else ''}{found.origin}"
            ),
        )
    tokens = config.lengths.prompt + config.lengths.response
    full = found.kv_bytes * tokens * room.max_running
    yield (
        "kv cache",
        (
            f"{found.kv_text} = {found.kv_bytes / 1024:.3g} KiB a token; {room.max_running} "
            f"requests of {tokens} tokens: {gib(full)} for each replica"
        ),
    )
    if room.spreads and room.is_on_gpu and weights:
        left = EXAMPLE_GPU * room.memory_fraction - weights
        fitting = int(left * shards / found.kv_bytes) if left > 0 else 0
        yield (
            "example",
            (
                f"of a GPU of {EXAMPLE_GPU / 1e9:.0f} GB, engine.memory_fraction = "
                f"{room.memory_fraction:g} leaves {gib(left)} beside the weights: {fitting} "
                f"tokens, {fitting // tokens} such requests"
                if fitting
                else f"a GPU of {EXAMPLE_GPU / 1e9:.0f} GB cannot hold the weights; raise "
                "engine.tensor_parallel"
            ),
        )


def model_size(config: RolloutConfig) -> ModelSize | None:
    """The figures of a configuration's model; None where they are not known here."""
    facts, origin = _facts_in(_files_of(config.model.path, config.model.revision)), ""
    if facts is None:
        facts, origin = published_facts(config.model.path), ", by its published figures"
    if facts is None:
        return None
    room = config.engine.model_room()
    dtype = "auto" if room is None else room.dtype
    if dtype == "auto" and room is not None and not room.is_auto_stored:
        dtype, origin = "float32", f"{origin}; half of it where the CPU computes in bfloat16"
    dtype = facts.dtype if dtype == "auto" else dtype
    return ModelSize(facts, _BYTES_OF.get(dtype.removeprefix("torch."), 2), origin)


def context_tokens(config: RolloutConfig) -> int | None:
    """Tokens of prompt and response that an engine has room for; None where that is unknown."""
    from rollout.engine.pool.opening import find_context_length

    room, given = config.engine.model_room(), find_context_length(config.engine)
    if room is None:
        return given
    size = model_size(config)
    lengths = [given, None if size is None else size.facts.context]
    known = [length for length in lengths if length is not None]
    return min(known) - room.kept_tokens if known else None


def stored_bytes(config: RolloutConfig) -> int | None:
    """What a model's weights take as they are stored; None where its files are not here."""
    files = _files_of(config.model.path, config.model.revision)
    return None if files is None else _stored(files) or None


def is_quantized(config: RolloutConfig) -> bool:
    """Whether a model's weights stay as they are stored, whatever the engine computes in."""
    files = _files_of(config.model.path, config.model.revision)
    try:
        return files is not None and "quantization_config" in json.loads(
            (files / "config.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError, TypeError):
        return False


def _facts_in(files: Path | None) -> PublishedFacts | None:
    if files is None:
        return None
    try:
        facts = json.loads((files / "config.json").read_text(encoding="utf-8"))
        facts = facts.get("text_config", facts)
        layers, heads = int(facts["num_hidden_layers"]), int(facts["num_attention_heads"])
        kv_heads = int(facts.get("num_key_value_heads") or heads)
        width = int(facts.get("head_dim") or facts["hidden_size"] // heads)
        context = facts.get("max_position_embeddings")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    dtype = str(facts.get("dtype") or facts.get("torch_dtype") or "bfloat16")
    longest = context if isinstance(context, int) else None
    return PublishedFacts(_parameters(files), layers, kv_heads, width, longest, dtype)


def _files_of(path: str, revision: str | None) -> Path | None:
    """The directory with the model's files, where there is one."""
    if path.startswith(EMBEDDED_PREFIX):
        here = converted_directory()
        return here if here.is_dir() else None
    here = Path(path).expanduser()
    if os.path.isdir(here):
        return here
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, "config.json", revision=revision)
    except (ImportError, ValueError):  # ValueError: not a name that the hub could have
        return None
    return Path(found).parent if isinstance(found, str) else None


def _parameters(files: Path) -> int | None:
    """Counted in the headers of the safetensors files."""
    tensors = [entry for file in _weight_files(files) for entry in _tensors_of(file)]
    return sum(size // _BYTES_STORED.get(dtype, 1) for dtype, size in tensors) or None


def _stored(files: Path) -> int:
    """By the headers, or the size of files without one."""
    return sum(
        sum(size for _, size in _tensors_of(file)) or file.stat().st_size
        for file in _weight_files(files) or [*files.glob("*.bin")]
    )


def _weight_files(files: Path) -> list[Path]:
    """Those that an index names, where there is one: a directory may hold the weights twice."""
    try:
        index = json.loads((files / "model.safetensors.index.json").read_text(encoding="utf-8"))
        named = [files / name for name in sorted(set(index["weight_map"].values()))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        named = [files / "model.safetensors"]
    return [file for file in named if file.is_file()] or [*files.glob("*.safetensors")]


def _tensors_of(file: Path) -> list[tuple[str, int]]:
    """The dtype and the bytes of each tensor, by the file's header; none where it has no header."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length if length <= LONGEST_HEADER else 0))
        header.pop("__metadata__", None)
        spans = [(entry["dtype"], entry["data_offsets"]) for entry in header.values()]
        return [(str(dtype), int(end) - int(start)) for dtype, (start, end) in spans]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def gib(size: float) -> str:
    """A size for people."""
    return f"{size / GIB:.3g} GiB"
