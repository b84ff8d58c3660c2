"""Checks of requests before they are sent, and of token ids that have arrived.

An id outside the vocabulary can kill an engine, and a trainer. A sampling field of another type
ends the connection to the engine for all requests on it; agents may assign what they like.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec

from rollout.engine.core import SamplingParams
from rollout.engine.cores.checks import describe_outside_id
from rollout.errors import EngineError
from rollout.token_prefix import TokenPrefix

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
