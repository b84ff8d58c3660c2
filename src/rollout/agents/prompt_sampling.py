"""How one prompt is sampled: the configuration, a prompt's overrides, and what the wire wants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from rollout.config import RolloutConfig, SamplingConfig
from rollout.engine.core import EngineInfo, SamplingParams
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEYS = tuple(field.name for field in attrs.fields(SamplingConfig))


def sampling_of(
    config: RolloutConfig, overrides: Mapping[str, Any], *, validate: bool
) -> SamplingParams:
    """The sampling of a prompt's generations, without seed and turn budget.

    Raises:
        ConfigError: An override names no field of `sampling`, or has a bad value.
    """
    base = config.validation_sampling if validate else config.sampling
    unknown = [key for key in overrides if key not in _KEYS]
    instead = SamplingConfig.instead_of(unknown[0]) if unknown else ""
    if instead:
        raise ConfigError(f"sampling.{unknown[0]} = {overrides[unknown[0]]!r}: {instead}")
    if unknown:
        raise ConfigError(
            f"sampling.{unknown[0]}: unknown key in a prompt's sampling; known: {', '.join(_KEYS)}"
        )
    merged = SamplingConfig(**dict(overrides)).over(base) if overrides else base
    return SamplingParams(
        max_new_tokens=merged.max_new_tokens or config.lengths.response,
        temperature=0.0 if merged.greedy else merged.temperature,
        top_p=merged.top_p,
        top_k=merged.top_k,
        min_p=merged.min_p,
        repetition_penalty=merged.repetition_penalty,
        presence_penalty=merged.presence_penalty,
        frequency_penalty=merged.frequency_penalty,
        stop_token_ids=tuple(merged.stop_token_ids),
        top_log_probs=merged.top_log_probs,
    )


def top_log_probs_fault(count: int, info: EngineInfo) -> str:
    """Why the engines cannot tell so many of the most likely tokens; empty where they may."""
    most = info.max_top_log_probs
    if most is None or count <= most:
        return ""
    able = f"at most {most}" if most else f"0: the engines ({info.core or 'custom'}) tell none"
    return f"sampling.top_log_probs = {count}: expected {able}"
