"""A transcript's parts as bytes, as they are held and written."""

from __future__ import annotations

from array import array
from typing import Any, Literal

import msgspec
import numpy as np


class PackedTranscript(msgspec.Struct, frozen=True, array_like=True):
    """A transcript as bytes; `Transcript.from_packed` makes an equal one.

    Attributes:
        ids: int32 of each token, in the pieces in which they came.
        spans: Of each its author and where it stops; see `SpanTable`.
        runs, reasons: As in `SpanTable`.
        log_probs: float32 of each generated span.
        top: By where their span starts, how many most likely ids each token has, their ids, int32,
            and log-probs, float32.
        experts: (layers, top_k) and int16 of the first tokens; None where nobody knows them.
    """

    ids: list[bytes]
    spans: bytes
    runs: bytes
    reasons: tuple[str, ...]
    log_probs: list[bytes]
    top: dict[int, tuple[int, bytes, bytes]] | None
    experts: tuple[int, int, bytes] | None


def packed_values(code: Literal["i", "f"], dtype: type[np.generic], values: Any) -> bytes:
    """`values` as packed bytes; of packed ones, bytes are copied and no object is made."""
    if isinstance(values, array) and values.typecode == code:
        return values.tobytes()
    if isinstance(values, np.ndarray) and values.dtype == dtype:
        return values.tobytes()
    return array(code, values.tolist() if isinstance(values, np.ndarray) else values).tobytes()
