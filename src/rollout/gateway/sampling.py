"""How a call is sampled: the trajectory's own settings, and what the client sets over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from rollout.agents.prompt_sampling import make_sampling
from rollout.engine.cores.checks import find_sampling_fault
from rollout.errors import ConfigError
from rollout.gateway.calls import GatewayError

if TYPE_CHECKING:
    from rollout.agents import AgentContext
    from rollout.engine.core import SamplingParams
    from rollout.gateway.calls import GatewayCall

#: What "pin" and "refuse" are about, beside the seed: how tokens are drawn, not how many.
PINNED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def sample_call(
    context: AgentContext, call: GatewayCall, policy: Literal["accept", "pin", "refuse"]
) -> tuple[GatewayCall, SamplingParams]:
    """The call as it is served, and what its turns are sampled with, without turn budget.

    A client may ask for fewer tokens than the configuration allows, not for more; for more of the
    most likely tokens than rows hold, not for fewer: of those its answer leaves some out.

    Args:
        context: Of the trajectory.
        call: What a client asks for; itself where nothing of it is overridden.
        policy: `gateway.sampling`.

    Raises:
        GatewayError: A value is none that the engines have, or one that "refuse" refuses.
    """
    services, validate = context.services, context.identity.validate
    # Not `context.sampling`: that of the main conversation is what its last call asked for.
    own = make_sampling(services.config, context.prompt.sampling, validate=validate)
    differing = {
        name: call.sampling[name]
        for name in PINNED
        if name in call.sampling and call.sampling[name] != getattr(own, name)
    }
    if call.seed is not None:
        differing["seed"] = call.seed
    if differing and policy == "refuse":
        name, value = next(iter(differing.items()))
        expected = f"expected {getattr(own, name)}" if name in PINNED else "expected none"
        message = f'{name} = {value!r}: {expected}, since gateway.sampling is "refuse"'
        raise GatewayError(400, "invalid_request", message, name)
    if differing and policy == "pin":
        allowed = {name: value for name, value in call.sampling.items() if name not in differing}
        call = msgspec.structs.replace(call, sampling=allowed, seed=None)
    overrides = context.prompt.sampling, call.sampling
    try:
        wanted = make_sampling(services.config, *overrides, validate=validate)
    except ConfigError as error:
        field = next((name for name in call.sampling if f".{name}" in str(error)), None)
        raise GatewayError(400, "invalid_request", str(error), field) from error
    fault = find_sampling_fault(wanted, services.engines.info)
    if fault:
        field = "stop_token_ids" if ".stop_token_ids" in fault else "top_logprobs"
        raise GatewayError(400, "invalid_request", fault, field)
    return call, msgspec.structs.replace(
        wanted,
        max_new_tokens=min(own.max_new_tokens, wanted.max_new_tokens),
        top_log_probs=max(own.top_log_probs, wanted.top_log_probs),  # rows have the prompt's
    )
