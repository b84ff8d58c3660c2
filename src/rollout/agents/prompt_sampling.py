"""How one prompt is sampled: the configuration, a prompt's overrides, and what the wire wants."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from rollout.config import RolloutConfig, SamplingConfig
from rollout.engine.core import SamplingParams
from rollout.engine.cores.checks import check_sampling, find_sampling_fault
from rollout.errors import AgentError, ConfigError
from rollout.types import without_null_keys

if TYPE_CHECKING:
    from rollout.agents.services import Services
    from rollout.agents.trajectory_state import TrajectoryState
    from rollout.seeds import Identity
    from rollout.types import Prompt

logger = logging.getLogger("rollout.agents")

_KEYS = tuple(field.name for field in attrs.fields(SamplingConfig))
_PARAMS = SamplingParams.__struct_fields__


def make_sampling(
    config: RolloutConfig, *overrides: Mapping[str, Any], validate: bool
) -> SamplingParams:
    """The sampling of a prompt's generations, without seed and turn budget.

    Args:
        overrides: Fields of `sampling` over the configuration's, each mapping over those before.

    Raises:
        ConfigError: An override names no field of `sampling`, or has a bad value.
    """
    merged = config.validation_sampling if validate else config.sampling
    for given in overrides:
        for key in given:
            if key not in _KEYS:
                instead = SamplingConfig.instead_of(key)
                known = f"unknown key in a prompt's sampling; known: {', '.join(_KEYS)}"
                value = f" = {given[key]!r}" if instead else ""
                raise ConfigError(f"sampling.{key}{value}: {instead or known}")
        merged = SamplingConfig(**dict(given)).over(merged) if given else merged
    fields = {name: getattr(merged, name) for name in _KEYS if name in _PARAMS}
    fields["max_new_tokens"] = merged.max_new_tokens or config.lengths.response
    fields["temperature"] = 0.0 if merged.greedy else merged.temperature
    fields["stop_token_ids"] = tuple(merged.stop_token_ids)
    return SamplingParams(**fields)


def read_sampling(
    what: str,
    sampling: Mapping[str, Any] | SamplingParams,
    state: TrajectoryState,
    base: SamplingParams | None = None,
) -> SamplingParams:
    """The sampling that an agent sets, once it is known that the engines can do it.

    Args:
        what: The function that got it, for messages.
        sampling: Fields of which None says nothing; or all of it.
        state: Of the trajectory: fields stand over what its prompt and the configuration have.
        base: They stand over this one instead, and are those of `SamplingParams`.

    Raises:
        AgentError: It names no field, has a value that cannot be, or the engines cannot do it.
        EngineError: A field of `SamplingParams` has a value that is not of its type or range.
    """
    config, validate = state.services.config, state.identity.validate
    if base is not None and isinstance(sampling, Mapping):
        sampling = _replace_fields(what, base, dict(sampling))
    elif isinstance(sampling, Mapping):
        overrides = state.prompt.sampling, without_null_keys(sampling)
        try:
            sampling = make_sampling(config, *overrides, validate=validate)
        except ConfigError as error:
            raise AgentError(f"{what}: {error}") from error
    elif not isinstance(sampling, SamplingParams):
        expected = "expected SamplingParams, or a mapping of fields"
        raise AgentError(f"{what}: sampling = {sampling!r:.80}; {expected}")
    check_sampling(sampling)
    fault = find_sampling_fault(sampling, state.services.engines.info)
    if fault:
        raise AgentError(f"{what}: {fault}")
    return sampling


def _replace_fields(what: str, base: SamplingParams, fields: dict[str, Any]) -> SamplingParams:
    for name, value in fields.items():
        if name not in _PARAMS:
            instead = SamplingConfig.instead_of(name) or f"known: {', '.join(_PARAMS)}"
            raise AgentError(f"{what}: sampling.{name}: unknown field; {instead}")
        fields[name] = tuple(value) if isinstance(value, list) else value
    return msgspec.structs.replace(base, **without_null_keys(fields))


def warn_of_truncation(
    sampling: SamplingParams, services: Services, prompt: Prompt, identity: Identity
) -> None:
    """Warn of each of top_k, top_p and min_p that bends a training row, once a runtime."""
    neutral = {"top_k": -1, "top_p": 1.0, "min_p": 0.0}
    bent = [name for name, value in neutral.items() if getattr(sampling, name) != value]
    if services.warned.issuperset(bent):
        return
    services.warned.update(bent)
    named = []
    for name in bent:
        value, origin = getattr(sampling, name), "the agent, or a client of the gateway"
        if prompt.sampling.get(name) == value:
            origin = "the prompt's sampling"
        elif getattr(services.config.sampling, name) == value:
            origin = f"sampling.{name}"
        named.append(f"{name} = {value:g} ({origin})")
    logger.warning(
        "%s: tokens of a training row are sampled with %s. Their log-probs are told of the "
        "whole distribution, and not of the truncated one that they are drawn from, so that a "
        "trainer's ratios are off; expected top_k = -1, top_p = 1 and min_p = 0. Said once; "
        "the metric sampling/truncated_share counts on",
        identity.session_id,
        ", ".join(named),
    )
