"""What makes a request unusable, found before any work. No torch here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rollout.engine.core import EngineInfo, GenerationRequest, SamplingParams


def request_fault(request: GenerationRequest, info: EngineInfo) -> str | None:
    """Why the engine cannot serve `request`, with value and expectation; None if it can."""
    return (
        _experts_fault(request, info)
        or _prompt_fault(request.prompt_ids, info)
        or info.media_fault(each.medium.kind for each in request.media)
        or _sampling_fault(request.sampling, info)
    )


def _experts_fault(request: GenerationRequest, info: EngineInfo) -> str | None:
    if not request.routed_experts or info.expert_shape is not None:
        return None
    return "routed_experts: this engine tells none; SGLang does with engine.routed_experts = true"


def _prompt_fault(prompt_ids: bytes, info: EngineInfo) -> str | None:
    if len(prompt_ids) % 4:
        return f"prompt_ids has {len(prompt_ids)} bytes; expected packed int32"
    ids = np.frombuffer(prompt_ids, dtype="<i4")
    if not len(ids):
        return "the prompt has no tokens"
    if len(ids) >= info.context_length:
        return (
            f"the prompt has {len(ids)} tokens; expected at most {info.context_length - 1}, "
            f"since it and a new token must fit into a context of {info.context_length}"
        )
    is_outside = (ids < 0) | (ids >= info.vocab_size)
    if is_outside.any():
        position = int(is_outside.argmax())
        return (
            f"token id {ids[position]} at position {position} of the prompt is outside the "
            f"vocabulary of {info.vocab_size}"
        )
    return None


def _sampling_fault(sampling: SamplingParams, info: EngineInfo) -> str | None:
    vocab_size, most = info.vocab_size, info.max_top_log_probs or 0
    penalty, stops = sampling.repetition_penalty, sampling.stop_token_ids
    rules = (
        ("max_new_tokens", sampling.max_new_tokens >= 1, "at least 1"),
        ("temperature", 0 <= sampling.temperature < math.inf, "a finite number of at least 0"),
        ("top_p", 0 < sampling.top_p <= 1, "a number in (0, 1]"),
        ("top_k", sampling.top_k == -1 or sampling.top_k >= 1, "-1 or at least 1"),
        ("min_p", 0 <= sampling.min_p <= 1, "a number in [0, 1]"),
        ("repetition_penalty", 0 < penalty < math.inf, "a finite number above 0"),
        ("presence_penalty", math.isfinite(sampling.presence_penalty), "a finite number"),
        ("frequency_penalty", math.isfinite(sampling.frequency_penalty), "a finite number"),
        (
            "stop_token_ids",
            all(0 <= token < vocab_size for token in stops),
            f"ids in [0, {vocab_size})",
        ),
        ("top_log_probs", sampling.top_log_probs <= most, f"at most {most}"),
    )
    for name, is_met, expected in rules:
        if not is_met:
            return f"sampling.{name} = {getattr(sampling, name)!r}; expected {expected}"
    return None
