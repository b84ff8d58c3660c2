"""How one prompt is sampled: the configuration, a prompt's overrides, and what the wire wants."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from rollout.config import RolloutConfig, SamplingConfig
from rollout.engine.core import EngineInfo, SamplingParams
from rollout.engine.cores.checks import check_sampling
from rollout.errors import AgentError, ConfigError
from rollout.types import without_null_keys

if TYPE_CHECKING:
    from rollout.agents.services import Services
    from rollout.seeds import Identity
    from rollout.types import Prompt

logger = logging.getLogger("rollout.agents")

_KEYS = tuple(field.name for field in attrs.fields(SamplingConfig))


def make_sampling(
    config: RolloutConfig, overrides: Mapping[str, Any], *, validate: bool
) -> SamplingParams:
    """The sampling of a prompt's generations, without seed and turn budget.

    Raises:
        ConfigError: An override names no field of `sampling`, or has a bad value.
    """
    base = config.validation_sampling if validate else config.sampling
    for key in overrides:
        if key not in _KEYS:
            instead = SamplingConfig.instead_of(key)
            known = f"unknown key in a prompt's sampling; known: {', '.join(_KEYS)}"
            value = f" = {overrides[key]!r}" if instead else ""
            raise ConfigError(f"sampling.{key}{value}: {instead or known}")
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


def read_sampling(
    what: str,
    services: Services,
    prompt: Prompt,
    sampling: Mapping[str, Any] | SamplingParams,
    *,
    validate: bool,
) -> SamplingParams:
    """The sampling that an agent sets, over what the prompt and the configuration have.

    Args:
        what: The function that got it, for messages.
        sampling: Fields of `sampling`, of which None says nothing; or all of it.

    Raises:
        AgentError: It names no field of `sampling`, or has a value that cannot be.
        EngineError: A field of `SamplingParams` has a value that is not of its type.
    """
    if isinstance(sampling, SamplingParams):
        check_sampling(sampling)
        return sampling
    if not isinstance(sampling, Mapping):
        raise AgentError(
            f"{what}: sampling = {sampling!r:.80}; expected SamplingParams, or a mapping of fields"
        )
    overrides = {**prompt.sampling, **without_null_keys(sampling)}
    try:
        drawn = make_sampling(services.config, overrides, validate=validate)
    except ConfigError as error:
        raise AgentError(f"{what}: {error}") from error
    fault = top_log_probs_fault(drawn.top_log_probs, services.engines.info)
    if fault:
        raise AgentError(f"{what}: {fault}")
    return drawn


def replace_sampling(
    sampling: SamplingParams, fields: Mapping[str, Any], services: Services
) -> SamplingParams:
    """`sampling` with other values of these fields; None says nothing.

    Raises:
        AgentError: A name is none of its fields, or the engines cannot tell so many log-probs.
        EngineError: A value is not of its field's type, or out of its range.
    """
    known = SamplingParams.__struct_fields__
    for name in fields:
        if name not in known:
            instead = SamplingConfig.instead_of(name) or f"known: {', '.join(known)}"
            raise AgentError(f"generate: sampling.{name}: unknown field; {instead}")
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fields.items()
        if value is not None
    }
    drawn = msgspec.structs.replace(sampling, **given)
    check_sampling(drawn)
    fault = top_log_probs_fault(drawn.top_log_probs, services.engines.info)
    if fault:
        raise AgentError(f"generate: {fault}")
    return drawn


def warn_of_truncation(
    sampling: SamplingParams, services: Services, prompt: Prompt, identity: Identity
) -> None:
    """Warn of each of top_k, top_p and min_p that bends a training row, once a runtime."""
    values = {
        name: value
        for name, neutral in (("top_k", -1), ("top_p", 1.0), ("min_p", 0.0))
        if (value := getattr(sampling, name)) != neutral
    }
    if services.warned.issuperset(values):
        return
    services.warned.update(values)
    named = ", ".join(
        f"{name} = {value:g} ({_origin(name, value, services, prompt)})"
        for name, value in values.items()
    )
    logger.warning(
        "%s: tokens of a training row are sampled with %s. Their log-probs are told of the "
        "whole distribution, and not of the truncated one that they are drawn from, so that a "
        "trainer's ratios are off; expected top_k = -1, top_p = 1 and min_p = 0. Said once; "
        "the metric sampling/truncated_share counts on",
        identity.session_id,
        named,
    )


def _origin(name: str, value: float, services: Services, prompt: Prompt) -> str:
    """Say who has set a value of the sampling."""
    if prompt.sampling.get(name) == value:
        return "the prompt's sampling"
    if getattr(services.config.sampling, name) == value:
        return f"sampling.{name}"
    return "the agent, or a client of the gateway"


def top_log_probs_fault(count: int, info: EngineInfo) -> str:
    """Why the engines cannot tell so many of the most likely tokens; empty where they may."""
    most = info.capabilities.max_top_log_probs
    if most is None or count <= most:
        return ""
    able = f"at most {most}" if most else f"0: the engines ({info.core or 'custom'}) tell none"
    return f"sampling.top_log_probs = {count}: expected {able}"
