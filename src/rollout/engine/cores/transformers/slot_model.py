"""Loads a transformers model and computes one step of it over the slots of a KV cache.

Supported are decoder-only language models whose layers all attend to the whole context and whose
attention takes a backend by name: Llama, Qwen2, Qwen3 and their MoE variants, Mistral without its
window, OLMo, Phi and many more. Refused at the start, with the reason: sliding windows and chunked
attention, recurrent layers (Mamba and hybrids), logit softcapping, attention sinks, layers that
share keys and values, rotary positions that depend on the length, encoder-decoder models.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from rollout.engine.core import EngineInfo
from rollout.engine.cores.devices import gpu_of
from rollout.engine.cores.transformers.attention import (
    BACKEND,
    StepLayout,
    StepSpan,
    register_backend,
)
from rollout.engine.cores.transformers.kv import KeyValueCache
from rollout.engine.cores.transformers.vision import (
    FAMILIES,
    MediaReader,
    StepMedia,
    Unit,
    VisionPrompt,
    joined,
)
from rollout.engine.model_files import resolve_model
from rollout.engine.model_identity import INCIDENTAL
from rollout.engine.quiet import quiet_transformers
from rollout.errors import EngineError, MediaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
#: torch's questions whether this CPU multiplies bfloat16 by itself; older releases lack some.
BFLOAT16_PROBES = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
#: Types of rotary positions that differ with the longest sequence of a batch.
LENGTH_DEPENDENT = ("dynamic", "longrope")


class SlotModel:
    """A model and the KV cache of its slots, computed one step at a time by one thread.

    Args:
        reader: Of images and videos; None where the model gets none.

    Attributes:
        reader: As given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context_length: int,
        reader: MediaReader | None = None,
    ) -> None:
        self.reader = reader
        self._model: Any = model
        self._configs = {"config": model.config, "generation_config": model.generation_config}
        self._cache = KeyValueCache(slots=slots, context_length=context_length)

    def warm_up(self) -> None:
        """Take two steps, so that what the attention does not support shows at the start.

        Raises:
            EngineError: The model asks for it, or does not use the backend at all.
        """
        try:
            self.step(torch.ones(2, dtype=torch.int64), [StepSpan(0, 0, 2)], [0])
            self.step(torch.ones(1, dtype=torch.int64), [StepSpan(0, 2, 3)], [0])
        except NotImplementedError as error:
            raise EngineError(f"{type(self._model).__name__} is not supported: {error}") from error
        called, layers = self._cache.layers, self._model.config.get_text_config().num_hidden_layers
        if called != layers:
            raise EngineError(
                f"{type(self._model).__name__} is not supported: {called} of its {layers} layers "
                f"use the attention backend"
            )

    def configs_for(self, path: str) -> dict[str, Any]:
        """What other weights of this model are loaded with, from a directory without its own."""
        if not Path(path).is_dir() or Path(path, "config.json").exists():
            return {}
        return dict(self._configs)

    @property
    def is_released(self) -> bool:
        """Whether there are no weights to compute with."""
        return self._model is None

    def release(self, *, weights: bool) -> None:
        """Let go of all keys and values, and of the weights until `replace`."""
        self._cache.release()
        if self.reader is not None:
            self.reader.forget()
        if weights:
            self._model = None

    def replace(self, model: PreTrainedModel) -> None:
        """Compute with another model of the same shapes from now on."""
        self._model = model
        if self.reader is not None:
            self.reader.forget()

    def read(self, unit: Unit) -> None:
        """Look at images or videos; what they become is kept for the steps that need it.

        Raises:
            MediaError: One cannot be read.
        """
        assert self.reader is not None  # the engine says that it takes such media
        self.reader.rows_of(self._model, unit)

    def step_media(
        self, prompt: VisionPrompt, start: int, stop: int, offset: int
    ) -> StepMedia | None:
        """See `MediaReader.step_media`."""
        assert self.reader is not None
        return self.reader.step_media(self._model, prompt, start, stop, offset)

    def step(
        self,
        ids: Tensor,
        spans: Sequence[StepSpan],
        sampled: Sequence[int],
        *,
        positions: npt.NDArray[np.int64] | None = None,
        media: Sequence[StepMedia] = (),
    ) -> Tensor:
        """Logits (R, V) of those spans whose indices are in `sampled`; all spans enter the cache.

        Args:
            ids: (N,) int64, the tokens of all spans in order.
            spans: Single tokens first, in the order of their slots; then parts of prompts.
            sampled: R indices of spans whose last token's logits are wanted.
            positions: (rows, N) where they are not those of text.
            media: What stands for the placeholders among the tokens.
        """
        layout = StepLayout(spans, self._cache, self._model.device, self._model.dtype)
        device = self._model.device
        ends = torch.tensor([span.stop - span.start for span in spans]).cumsum(0) - 1
        wanted = ends[list(sampled)].to(device)
        where = layout.position_ids
        if positions is not None:
            where = torch.from_numpy(positions).unsqueeze(1).to(device)
        options = {"position_ids": where, "use_cache": False, "slot_layout": layout}
        ids = ids.unsqueeze(0).to(device)
        if media:
            return self._logits_with_media(ids, joined(media), wanted, options)
        outputs = self._model(input_ids=ids, logits_to_keep=wanted, **options)
        logits: Tensor = outputs.logits[0]
        return logits

    def _logits_with_media(
        self, ids: Tensor, media: StepMedia, wanted: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """The language model over embeddings, as the whole model's own forward runs it."""
        embeddings = self._model.get_input_embeddings()(ids)
        at = torch.from_numpy(media.at).to(ids.device)
        embeddings[0, at] = media.rows
        if media.deep:
            options["visual_pos_masks"] = torch.zeros_like(ids, dtype=torch.bool)
            options["visual_pos_masks"][0, at] = True
            options["deepstack_visual_embeds"] = list(media.deep)
        decoder = self._model.get_decoder()
        hidden = decoder(inputs_embeds=embeddings, **options).last_hidden_state[0, wanted]
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        return logits

    def copy_prefix(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy what the cache holds for positions ``[start, stop)`` to another slot."""
        self._cache.copy(source, target, start, stop)

    def clear(self, slot: int) -> None:
        """Forget a slot whose numbers are not finite."""
        self._cache.clear(slot)


def load_model(
    path: str,
    *,
    revision: str | None,
    trust_remote_code: bool,
    dtype: str,
    device: str,
    configs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """The model, ready to be stepped; nothing is written to the terminal.

    Args:
        dtype: "bfloat16", "float16", "float32", or "auto": the model's own on a GPU; on a CPU
            bfloat16 where the CPU computes in it, else float32.
        device: A torch device, or "auto": the GPU if there is one.

    Raises:
        EngineError: It cannot be loaded, or its kind of attention is not supported.
    """
    directory = path if configs else resolve_model(path, revision)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = _dtype(dtype, device)
    register_backend()
    try:
        with quiet_transformers():
            kind = _kind_of(directory, revision, trust_remote_code, configs)
            found: Any = kind.from_pretrained(
                directory,
                revision=revision or "main",
                trust_remote_code=trust_remote_code,
                dtype=precision,
                output_loading_info=True,
                **(configs or {}),
            )
            model, report = found
            fault = _architecture_fault(model)
            if fault is None:
                text = model.get_decoder() if is_vision(model) else model
                text.set_attn_implementation(BACKEND)
                model = model.eval().requires_grad_(False).to(device)
    except Exception as error:
        raise EngineError(f"model.path = {path!r} cannot be loaded: {error}") from error
    if fault is not None:
        raise EngineError(
            f"model.path = {path!r}: {type(model).__name__} is not supported: {fault}"
        )
    missing = sorted(report["missing_keys"])
    if missing:  # transformers fills them with noise
        raise EngineError(f"model.path = {path!r}: the tensor {missing[0]} is missing")
    loaded: PreTrainedModel = model
    return loaded


def _kind_of(
    directory: str,
    revision: str | None,
    trust_remote_code: bool,
    configs: Mapping[str, Any] | None,
) -> Any:
    """How transformers loads this model."""
    config = (configs or {}).get("config") or AutoConfig.from_pretrained(
        directory, revision=revision or "main", trust_remote_code=trust_remote_code
    )
    is_ours = config.model_type in FAMILIES
    return AutoModelForImageTextToText if is_ours else AutoModelForCausalLM


def is_vision(model: PreTrainedModel) -> bool:
    """Whether it is a vision-language model that takes media here."""
    return model.config.model_type in FAMILIES


def open_reader(
    model: PreTrainedModel, path: str, *, revision: str | None, trust_remote_code: bool
) -> tuple[MediaReader | None, tuple[str, ...], str]:
    """What reads the model's media, their kinds, and why a kind is missing."""
    if not is_vision(model):
        return None, (), "the model reads text only"
    from rollout.chat.processors import load_media_processor

    try:
        processor = load_media_processor(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    except MediaError as error:
        return None, (), str(error)
    if processor is None:
        return None, (), f"{path} has no processor beside the model"
    family = model.config.model_type
    kinds = tuple(kind for kind in FAMILIES[family] if kind in processor.kinds)
    lacking = sorted({"image", "video"} - set(kinds))
    why = f"{family} is run with {' and '.join(kinds)} alone" if lacking else ""
    return MediaReader(processor), kinds, why


def describe(
    model: PreTrainedModel,
    *,
    fingerprint: str,
    context_length: int | None,
    max_requests: int,
    max_running: int,
    modalities: tuple[str, ...] = (),
    no_media: str = "",
) -> EngineInfo:
    """The facts about a loaded model that clients must agree with."""
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    lengths = [length for length in (context_length, longest) if length]
    if not lengths:
        raise EngineError("the model names no longest context; set engine.context_length")
    embeddings: Any = model.get_input_embeddings()
    return EngineInfo(
        vocab_size=embeddings.num_embeddings,
        eos_ids=_eos_ids(model),
        context_length=min(lengths),
        fingerprint=fingerprint,
        max_requests=max_requests,
        max_running=max_running,
        core="transformers",
        device=str(model.device),
        gpu=gpu_of(str(model.device)),
        max_top_log_probs=embeddings.num_embeddings,
        modalities=modalities,
        no_media=no_media,
    )


def architecture_of(model: PreTrainedModel) -> str:
    """16 hex digits that agree where other weights fit in the place of these."""
    facts = model.config.get_text_config().to_dict()
    named = {name: value for name, value in facts.items() if name not in INCIDENTAL}
    embeddings: Any = model.get_input_embeddings()
    told = [named, embeddings.num_embeddings, _eos_ids(model)]
    if is_vision(model):
        vision = model.config.vision_config.to_dict()
        told.append({name: value for name, value in vision.items() if name not in INCIDENTAL})
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _dtype(name: str, device: str) -> torch.dtype | str:
    if name != "auto":
        if name not in DTYPES:
            raise EngineError(f"engine.dtype = {name!r}; expected auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if not device.startswith("cpu"):
        return "auto"
    probes = (getattr(torch.cpu, name, None) for name in BFLOAT16_PROBES)
    return torch.bfloat16 if any(probe() for probe in probes if probe) else torch.float32


def _eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    given = None
    if model.generation_config is not None:
        given = model.generation_config.eos_token_id
    if given is None:
        given = model.config.get_text_config().eos_token_id
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)


def _architecture_fault(model: PreTrainedModel) -> str | None:
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
    return next((text for holds, text in rules if holds), None)
