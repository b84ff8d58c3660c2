"""How a call is sampled: the trajectory's own settings, and what the client sets over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rollout.errors import ConfigError
from rollout.gateway.calls import GatewayError
from rollout.scheduling.prompt_sampling import sampling_of, top_log_probs_fault

if TYPE_CHECKING:
    from rollout.agents import AgentContext
    from rollout.engine.core import SamplingParams
    from rollout.gateway.calls import GatewayCall


def sampling_of_call(context: AgentContext, call: GatewayCall) -> SamplingParams:
    """What the call's turns are sampled with, without seed and turn budget.

    A client may ask for fewer tokens than the configuration allows, not for more.

    Raises:
        GatewayError: A value is none that the engines have.
    """
    own, services = context.sampling, context.services
    overrides = {**context.prompt.sampling, **call.sampling}
    try:
        asked = sampling_of(services.config, overrides, validate=context.identity.validate)
    except ConfigError as error:
        field = next((name for name in call.sampling if f".{name}" in str(error)), None)
        raise GatewayError(400, "invalid_request", str(error), field) from error
    fault = top_log_probs_fault(asked.top_log_probs, services.engines.info)
    if fault:
        raise GatewayError(400, "invalid_request", fault, "top_logprobs")
    most = min(own.max_new_tokens, asked.max_new_tokens)
    return msgspec.structs.replace(asked, max_new_tokens=most)
