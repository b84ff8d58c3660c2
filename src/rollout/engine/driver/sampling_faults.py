"""What is looked at of a request's sampling before it is sent.

An engine's side ends the connection over a value of another type, and takes all other requests
with it. Agents may assign what they like.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec

from rollout.engine.core import SamplingParams
from rollout.errors import EngineError

_ENCODER = msgspec.msgpack.Encoder()
#: As the other side reads it.
_DECODER = msgspec.msgpack.Decoder(SamplingParams)
_TYPES = get_type_hints(SamplingParams, include_extras=True)


def check_sampling(sampling: SamplingParams) -> None:
    """Let pass what an engine can read.

    Raises:
        EngineError: A field has another type, or is out of its range; names it and its value.
    """
    try:
        _DECODER.decode(_ENCODER.encode(sampling))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        fault = sampling_fault(sampling) or f"sampling: {error}"
        raise EngineError(fault, reason="sampling") from None


def sampling_fault(sampling: Any) -> str:
    """Which field is wrong, its value and what was expected; empty where none is."""
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
