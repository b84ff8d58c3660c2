"""Loads a transformers model and computes batches of it over the slots of a KV cache.

Supported are decoder-only language models whose layers all attend to the whole context and whose
attention takes a backend by name: Llama, Qwen2, Qwen3 and their MoE variants, Mistral without its
window, OLMo, Phi and many more. Refused at the start, with the reason: models that read images,
sliding windows and chunked attention, recurrent layers (Mamba and hybrids), logit softcapping,
attention sinks, layers that share keys and values, rotary positions that depend on the length,
encoder-decoder models.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rollout.engine.core import ALL_TAGS, TAGS_OF_LEVEL, Capabilities, EngineInfo
from rollout.engine.cores.base import name_gpu
from rollout.engine.cores.transformers.attention import (
    BACKEND,
    BatchLayout,
    KeyValueCache,
    Span,
    attend_slots,
)
from rollout.engine.model_files import INCIDENTAL, model_fingerprint, resolve_model
from rollout.engine.quiet import quiet_transformers
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.engine.cores.transformers.scheduler import Piece, TransformersOptions

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: torch's questions whether this CPU multiplies bfloat16 by itself; older releases lack some.
BFLOAT16_PROBES = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
#: Types of rotary positions that differ with the longest sequence of a batch.
LENGTH_DEPENDENT = ("dynamic", "longrope")
#: Parts of a configuration that only models of more than text have.
BESIDE_TEXT = ("vision_config", "audio_config")


class SlotModel:
    """A model and the KV cache of its slots, computed one batch at a time by one thread.

    Attributes:
        info: The facts about it that clients must agree with.
        cache: Of its slots.

    Raises:
        EngineError: It cannot be loaded, or its kind is not supported.
    """

    def __init__(self, options: TransformersOptions) -> None:
        self._options = options
        self._source: tuple[str, str | None] = (options.model, options.revision)
        self._model: Any = load_model(*self._source, options)
        self._configs = {
            "config": self._model.config,
            "generation_config": self._model.generation_config,
        }
        self._architecture = name_architecture(self._model)
        self.info = describe_model(self._model, options)
        self.cache = KeyValueCache(
            slots=options.max_running, context_length=self.info.context_length
        )
        self._warm_up()

    def compute(self, pieces: Sequence[Piece]) -> Tensor:
        """Logits (R, V) at the last token of each of R pieces; all tokens enter the cache."""
        tokens = max(piece.stop - piece.start for piece in pieces)
        ids = np.zeros((len(pieces), tokens), dtype=np.int64)
        for row, piece in zip(ids, pieces, strict=True):
            row[tokens - (piece.stop - piece.start) :] = piece.sequence.ids[
                piece.start : piece.stop
            ]
        spans = [Span(piece.slot.index, piece.start, piece.stop) for piece in pieces]
        return self._forward(torch.from_numpy(ids), spans)

    def load_weights(self, path: str) -> None:
        """Compute with other weights of the same model from now on.

        Both are in memory for a moment. A directory without a configuration takes the model's own.
        """
        self._model = self._load_other(path, None)
        self._source = (path, None)

    def sleep(self, level: int) -> None:
        """Release the KV cache, and at level 2 the weights."""
        self.cache.release()
        if level > 1:
            self._model = None

    def wake_up(self) -> None:
        """Load the weights that were released; the KV cache grows with the first requests."""
        if self._model is None:
            self._model = self._load_other(*self._source)

    def _load_other(self, path: str, revision: str | None) -> PreTrainedModel:
        has_config = not Path(path).is_dir() or Path(path, "config.json").exists()
        loaded = load_model(
            path, revision, self._options, configs=None if has_config else self._configs
        )
        found = name_architecture(loaded)
        if found != self._architecture:
            raise EngineError(
                f"{path}: the weights are of model {found}, the engine serves {self._architecture}"
            )
        return loaded

    def _forward(self, ids: Tensor, spans: Sequence[Span]) -> Tensor:
        device = self._model.device
        layout = BatchLayout(spans, self.cache, device, self._model.dtype)
        outputs = self._model(
            input_ids=ids.to(device),
            position_ids=layout.position_ids,
            use_cache=False,
            logits_to_keep=1,
            layout=layout,
        )
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def _warm_up(self) -> None:
        """Compute two batches, so that what the attention does not support shows at the start."""
        name = type(self._model).__name__
        try:
            self._forward(torch.ones(1, 2, dtype=torch.int64), [Span(0, 0, 2)])
            self._forward(torch.ones(1, 1, dtype=torch.int64), [Span(0, 2, 3)])
        except NotImplementedError as error:
            raise EngineError(f"{name} is not supported: {error}") from error
        called = len(self.cache.layers)
        layers = self._model.config.get_text_config().num_hidden_layers
        if called != layers:
            raise EngineError(
                f"{name} is not supported: {called} of its {layers} layers use the attention "
                "backend"
            )


def load_model(
    path: str,
    revision: str | None,
    options: TransformersOptions,
    configs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """The model, ready to be computed; nothing is written to the terminal."""
    directory = path if configs else resolve_model(path, revision)
    device = choose_device(options.device, options.gpu)
    given: dict[str, Any] = {
        "revision": revision or "main",
        "trust_remote_code": options.trust_remote_code,
    }
    precision = choose_dtype(options.dtype, device)
    AttentionInterface.register(BACKEND, attend_slots)
    try:
        with quiet_transformers():
            config = (configs or {}).get("config") or AutoConfig.from_pretrained(directory, **given)
            if any(getattr(config, name, None) is not None for name in BESIDE_TEXT):
                raise EngineError(
                    f"model.path = {path!r}: {config.model_type} reads more than text, which the "
                    "embedded engine does not; serve it with engine.kind = 'sglang'"
                )
            found: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=precision, output_loading_info=True, **given, **(configs or {})
            )
            model, report = found
            fault = _find_architecture_fault(model)
            if fault:
                raise EngineError(
                    f"model.path = {path!r}: {type(model).__name__} is not supported: {fault}"
                )
            model.set_attn_implementation(BACKEND)
            model = model.eval().requires_grad_(False).to(device)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"model.path = {path!r} cannot be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers fills them with noise
        raise EngineError(f"model.path = {path!r}: the tensor {missing[0]} is missing")
    loaded: PreTrainedModel = model
    return loaded


def describe_model(model: PreTrainedModel, options: TransformersOptions) -> EngineInfo:
    """The facts about a loaded model."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    lengths = [length for length in (options.context_length, longest) if length]
    if not lengths:
        raise EngineError("the model names no longest context; set engine.context_length")
    embeddings: Any = model.get_input_embeddings()
    vocab_size = embeddings.num_embeddings
    path = resolve_model(options.model, options.revision)
    return EngineInfo(
        vocab_size=vocab_size,
        eos_ids=_read_eos_ids(model),
        context_length=min(lengths),
        fingerprint=model_fingerprint(path, options.revision),
        max_requests=options.max_running + options.max_queued,
        max_running=options.max_running,
        core="transformers",
        device=str(model.device),
        gpu=name_gpu(str(model.device)),
        capabilities=Capabilities(
            weights=("disk", "tensors", "groups"),
            in_place=True,
            sleep_levels=tuple(TAGS_OF_LEVEL),
            sleep_tags=ALL_TAGS,
            no_media="the embedded engine computes text only; engine.kind = 'sglang' reads images",
            max_top_log_probs=vocab_size,
        ),
    )


def name_architecture(model: PreTrainedModel) -> str:
    """16 hex digits that agree where other weights fit in the place of these."""
    facts = model.config.get_text_config().to_dict()
    named = {name: value for name, value in facts.items() if name not in INCIDENTAL}
    embeddings: Any = model.get_input_embeddings()
    text = json.dumps(
        [named, embeddings.num_embeddings, _read_eos_ids(model)], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def choose_device(name: str, gpu: int) -> str:
    """Where a model is computed; of the machine's GPUs, the one numbered `gpu`, counted round."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    count = torch.cuda.device_count() if name == "cuda" else 0
    return f"cuda:{gpu % count}" if count else name


def choose_dtype(name: str, device: str) -> torch.dtype | str:
    """What a model computes in; "auto" is its own on a GPU.

    On a CPU, "auto" is bfloat16 where the CPU computes in it, else float32.
    """
    if name != "auto":
        if name not in DTYPES:
            raise EngineError(f"engine.dtype = {name!r}; expected auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if not device.startswith("cpu"):
        return "auto"
    probes = (getattr(torch.cpu, name, None) for name in BFLOAT16_PROBES)
    return torch.bfloat16 if any(probe() for probe in probes if probe) else torch.float32


def _read_eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    found = getattr(model.generation_config, "eos_token_id", None)
    found = model.config.get_text_config().eos_token_id if found is None else found
    return (found,) if isinstance(found, int) else tuple(found or ())


def _find_architecture_fault(model: PreTrainedModel) -> str:
    """Why the slots cannot serve this model, as far as its configuration says."""
    config: Any = model.config.get_text_config()
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    has_window = getattr(config, "sliding_window", None) is not None
    if has_window and not getattr(config, "layer_types", None):
        has_window = getattr(config, "use_sliding_window", True)
    elif has_window:
        has_window = "sliding_attention" in kinds
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    forward = inspect.signature(model.forward).parameters
    rules = (
        (getattr(config, "is_encoder_decoder", False), "it is an encoder-decoder model"),
        (model._is_stateful, "it keeps a recurrent state"),
        (kinds, f"it has layers of {', '.join(kinds)}"),
        (has_window, f"it attends to a sliding window of {getattr(config, 'sliding_window', 0)}"),
        (not model._supports_attention_backend, "its attention takes no backend"),
        (getattr(config, "num_kv_shared_layers", 0), "its layers share keys and values"),
        (rope in LENGTH_DEPENDENT, f"its positions are of type {rope}, which depend on the length"),
        ("logits_to_keep" not in forward, "its forward takes no logits_to_keep"),
    )
    return next((text for holds, text in rules if holds), "")
