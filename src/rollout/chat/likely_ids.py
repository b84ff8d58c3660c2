"""The most likely ids at the places of a span, where a trajectory asked for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Of a span of T tokens: (T, k) the most likely ids, and (T, k) their log-probs.
Likely = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


def likely_of(top: tuple[npt.ArrayLike, npt.ArrayLike], count: int) -> Likely:
    """What an engine told of `count` tokens, copied.

    Raises:
        ValueError: It is of another number of tokens, or ids and log-probs do not agree.
    """
    ids, log_probs = np.array(top[0], dtype=np.int32), np.array(top[1], dtype=np.float32)
    if count and (ids.ndim != 2 or len(ids) != count or ids.shape != log_probs.shape):
        raise ValueError(
            f"append_generated: {count} ids, most likely ones of shape {ids.shape} with log-probs "
            f"of shape {log_probs.shape}; expected ({count}, k) twice"
        )
    return ids, log_probs


def packed_top(top: Mapping[int, Likely]) -> dict[int, tuple[int, bytes, bytes]]:
    """As `PackedTranscript.top` holds them."""
    return {
        start: (ids.shape[1], ids.tobytes(), values.tobytes())
        for start, (ids, values) in top.items()
    }


def unpacked_top(packed: Mapping[int, tuple[int, bytes, bytes]]) -> dict[int, Likely]:
    """Those of which this was `packed_top`."""
    return {
        start: (
            np.frombuffer(ids, np.int32).reshape(-1, width),
            np.frombuffer(values, np.float32).reshape(-1, width),
        )
        for start, (width, ids, values) in packed.items()
    }
