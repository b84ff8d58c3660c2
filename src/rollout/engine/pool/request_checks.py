"""Checks of requests before they are sent, and of token ids that have arrived.

An id outside the vocabulary can kill an engine, and a trainer. A sampling field of another type
ends the connection to the engine for all requests on it; agents may assign what they like.
"""

from __future__ import annotations

from typing import Any

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
        raise EngineError(_describe_sampling_fault(sampling, error), reason="sampling") from None


def _describe_sampling_fault(sampling: Any, error: Exception) -> str:
    """Describe which field is wrong, its value and what was expected, where that is known."""
    if not isinstance(sampling, SamplingParams):
        return f"sampling = {sampling!r:.80}: expected SamplingParams"
    what, _, place = str(error).partition(" - at `$[")
    if not place:
        return f"sampling: {error}"
    name = sampling.__struct_fields__[int(place.partition("]")[0])]
    return f"sampling.{name} = {getattr(sampling, name)!r:.80}: {what.replace('Exp', 'exp', 1)}"
