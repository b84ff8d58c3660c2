"""One request: what SGLang cannot do of it, and the fields that it is sent as. No SGLang here."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from rollout.engine.core import EngineInfo, GenerationRequest, SamplingParams, unpack_ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.engine.cores.sglang.server_arguments import SGLangOptions

#: SGLang keeps seeds as int64.
SEED_BITS = 63
#: Parameters of SGLang that no request of ours uses, as they change nothing.
_NOTHING: Mapping[str, Any] = {
    "min_new_tokens": 0,
    "n": 1,
    "stop": [],
    "logit_bias": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
}


def find_sampling_fault(sampling: SamplingParams) -> str:
    """What other engines can do and SGLang cannot; empty where it can."""
    if sampling.repetition_penalty != 1:
        return (
            f"sampling.repetition_penalty = {sampling.repetition_penalty!r}; expected 1: SGLang "
            "penalises generated tokens only and gives log-probs after the penalty"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(sampling, name) != 0:
            value = getattr(sampling, name)
            return f"sampling.{name} = {value!r}; expected 0: SGLang gives log-probs after it"
    if sampling.ignore_eos and sampling.stop_token_ids:
        return "sampling.ignore_eos: SGLang then ignores sampling.stop_token_ids too"
    return ""


def build_fields(
    request: GenerationRequest, options: SGLangOptions, info: EngineInfo, salt: str
) -> dict[str, Any]:
    """A request as fields of its `GenerateReqInput`."""
    ids = unpack_ids(request.prompt_ids)
    params = build_sampling(request.sampling, info.context_length - len(ids))
    if options.deterministic:
        params["sampling_seed"] = choose_seed(request.sampling)
    fields: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "top_logprobs_num": request.sampling.top_log_probs,
        "return_routed_experts": request.routed_experts,
        "routed_experts_start_len": request.routed_experts_start,
        "priority": request.priority,
        "extra_key": salt,
    }
    if request.session_id:
        fields["session_id"] = request.session_id
    return fields


def build_sampling(sampling: SamplingParams, room: int) -> dict[str, Any]:
    """Everything but the seed, by SGLang's names.

    What changes nothing is written out too: a server started with ``--preferred-sampling-params``
    fills in what a request leaves out.
    """
    return {
        "max_new_tokens": min(sampling.max_new_tokens, room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        **_NOTHING,
    }


def choose_seed(sampling: SamplingParams) -> int:
    """For deterministic inference, where SGLang gives requests without a seed all the same one."""
    return secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed


def make_salt(weight_version: int) -> str:
    """Keeps keys and values of other weights from being found in the prefix cache."""
    return f"weights-{weight_version}"
