"""How a call is sampled: the trajectory's own settings, and what the client sets over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rollout.agents.prompt_sampling import sampling_of, top_log_probs_fault
from rollout.errors import ConfigError
from rollout.gateway.calls import GatewayError

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
    services, validate = context.services, context.identity.validate
    # Not `context.sampling`: that of the main conversation is what its last call asked for.
    own = sampling_of(services.config, context.prompt.sampling, validate=validate)
    overrides = {**context.prompt.sampling, **call.sampling}
    try:
        asked = sampling_of(services.config, overrides, validate=validate)
    except ConfigError as error:
        field = next((name for name in call.sampling if f".{name}" in str(error)), None)
        raise GatewayError(400, "invalid_request", str(error), field) from error
    fault = top_log_probs_fault(asked.top_log_probs, services.engines.info)
    if fault:
        raise GatewayError(400, "invalid_request", fault, "top_logprobs")
    most = min(own.max_new_tokens, asked.max_new_tokens)
    return msgspec.structs.replace(asked, max_new_tokens=most)
