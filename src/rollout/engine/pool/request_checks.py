"""Checks of requests before they are sent, and of token ids that have arrived.

An id outside the vocabulary can kill an engine, and a trainer. A sampling field of another type
ends the connection to the engine for all requests on it; agents may assign what they like.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec

from rollout.engine.core import SamplingParams
from rollout.errors import EngineError
from rollout.token_prefix import TokenPrefix, find_outside_id

_ENCODER = msgspec.msgpack.Encoder()
#: As the engine's side reads it.
_DECODER = msgspec.msgpack.Decoder(SamplingParams)
_TYPES = get_type_hints(SamplingParams, include_extras=True)


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
        fault = describe_sampling_fault(sampling) or f"sampling: {error}"
        raise EngineError(fault, reason="sampling") from None


def describe_sampling_fault(sampling: Any) -> str:
    """Describe which field is wrong, its value and what was expected; empty where none is."""
    if not isinstance(sampling, SamplingParams):
        return f"sampling = {sampling!r:.80}: expected SamplingParams"
    for name, kind in _TYPES.items():
        value = getattr(sampling, name)
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            expected = str(error).replace("Expected", "expected", 1)
            return f"sampling.{name} = {value!r:.80}: {expected}"
    return ""
