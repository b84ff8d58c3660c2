"""What makes a request, or an answer, unusable, found before it is used. No torch here.

An id outside the vocabulary can kill an engine, and a trainer. A sampling field of another type
ends the connection to the engine for all requests on it; agents may assign what they like.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import msgspec

from rollout.engine.core import SamplingParams
from rollout.errors import EngineError
from rollout.token_prefix import TokenPrefix, find_outside_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.engine.core import EngineInfo, GenerationRequest

#: Of a sampled token: finite as float32, and not above 0 by more than rounding.
LogProb = Annotated[float, msgspec.Meta(ge=-1e30, le=1e-3)]
_Shape = TypeVar("_Shape")
_ENCODER = msgspec.msgpack.Encoder()
#: As the engine's side reads it.
_DECODER = msgspec.msgpack.Decoder(SamplingParams)


def check_ids(prompt: bytes | TokenPrefix, vocab_size: int) -> None:
    """Check the ids of a prompt; of a prefix, only those that were not checked before."""
    if not isinstance(prompt, TokenPrefix):
        fault = describe_outside_id(prompt, vocab_size)
    else:
        packed = prompt.packed(prompt.checked)
        fault = describe_outside_id(packed, vocab_size, prompt.checked)
        if not fault:
            prompt.checked = prompt.length
    if fault:
        raise EngineError(fault)


def check_sampling(sampling: SamplingParams) -> None:
    """Check that an engine can read these."""
    try:
        _DECODER.decode(_ENCODER.encode(sampling))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        fault = _describe_sampling_fault(sampling) or f"sampling: {error}"
        raise EngineError(fault, reason="sampling") from None


def _describe_sampling_fault(sampling: Any) -> str:
    """Describe which field is wrong, its value and what was expected; empty where none is."""
    if not isinstance(sampling, SamplingParams):
        return f"sampling = {sampling!r:.80}: expected SamplingParams"
    for name, kind in get_type_hints(SamplingParams, include_extras=True).items():
        value = getattr(sampling, name)
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            expected = str(error).replace("Expected", "expected", 1)
            return f"sampling.{name} = {value!r:.80}: {expected}"
    return ""


def find_request_fault(request: GenerationRequest, info: EngineInfo) -> str:
    """Why the engine cannot serve `request`, with value and expectation; empty where it can."""
    if request.routed_experts and info.capabilities.expert_shape is None:
        return (
            "routed_experts: this engine tells none; SGLang does with engine.routed_experts = true"
        )
    return (
        _find_prompt_fault(request.prompt_ids, info)
        or info.media_fault(each.medium.kind for each in request.media)
        or find_sampling_fault(request.sampling, info)
    )


def describe_outside_id(ids: bytes, vocab_size: int, start: int = 0) -> str:
    """Describe the first id that is not of the vocabulary; empty where all are.

    Args:
        ids: Packed int32.
        vocab_size: Of the engine; 0 where it is not known, and only negative ids are outside.
        start: Position of the first id.
    """
    at = find_outside_id(ids, vocab_size)
    if at is None:
        return ""
    token = int.from_bytes(ids[4 * at : 4 * at + 4], "little", signed=True)
    of = f" of {vocab_size} ids" if vocab_size else ""
    return f"token id {token} at position {start + at} is outside the engine's vocabulary{of}"


def _find_prompt_fault(prompt_ids: bytes, info: EngineInfo) -> str:
    if len(prompt_ids) % 4:
        return f"prompt_ids has {len(prompt_ids)} bytes; expected packed int32"
    count = len(prompt_ids) // 4
    if not count:
        return "the prompt has no tokens"
    if count >= info.context_length:
        return (
            f"the prompt has {count} tokens; expected at most {info.context_length - 1}, "
            f"since it and a new token must fit into a context of {info.context_length}"
        )
    return describe_outside_id(prompt_ids, info.vocab_size)


def find_sampling_fault(sampling: SamplingParams, info: EngineInfo) -> str:
    """Why the engine cannot sample so, with value and expectation; empty where it can."""
    most, vocab_size = info.capabilities.max_top_log_probs, info.vocab_size
    able = f"at most {most}" if most else "0: the engine tells none"
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
            not vocab_size or all(0 <= token < vocab_size for token in stops),
            f"ids in [0, {vocab_size})",
        ),
        ("top_log_probs", most is None or sampling.top_log_probs <= most, able),
    )
    for name, is_met, expected in rules:
        if not is_met:
            return f"sampling.{name} = {getattr(sampling, name)!r}; expected {expected}"
    return ""


def read_fields(answer: Any, shape: type[_Shape]) -> _Shape:
    """An answer, decoded from JSON, as the Struct `shape`; raises the error that it may be."""
    fault = answer.get("error")
    if fault is not None:
        raise EngineError(str(fault.get("message") if isinstance(fault, dict) else fault))
    try:
        return msgspec.convert(answer, type=shape)
    except msgspec.ValidationError as error:
        raise EngineError(f"a field of the answer is not as expected: {error}") from error


def check_log_probs(field: str, count: int, ids_field: str, expected: int) -> None:
    """Check that there is one log-prob for each id."""
    if count != expected:
        raise EngineError(f"{field} has {count} entries; expected {expected}, as {ids_field} has")


def check_scored_ids(
    field: str, scored: Sequence[int | None], ids_field: str, ids: Sequence[int], start: int = 0
) -> None:
    """Check that log-probs belong to the ids that they stand beside."""
    for position, (own, expected) in enumerate(zip(scored, ids, strict=True), start):
        if own is not None and own != expected:
            raise EngineError(
                f"{field}[{position}] is of token {own}; expected {expected}, as in {ids_field}"
            )
