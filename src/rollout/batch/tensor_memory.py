"""Where the tensors of a batch lie: memory of batches that are gone, or else of the system.

NumPy asks the system for huge pages. Where the host of a virtual machine has taken back what nobody
used, it has to find each of them first: 500 ms for 1024 rows of 5120 tokens, at each batch. Small
pages take 85 ms where the machine has them at hand and three times as long where its host has to
find them, so what one batch has used the next one takes over.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

#: Bytes from which on an array's memory is kept.
LARGE = 1 << 20
#: Blocks that are kept: as many as a batch has large tensors.
MOST_KEPT = 10


class TensorMemory:
    """Makes arrays, the large ones in memory of earlier ones that nobody refers to any more.

    Kept is what was released last, at most `MOST_KEPT` blocks, for as long as this object lives. It
    may be used from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Arrays are released in any thread, at any time: that only appends here.
        self._released: deque[npt.NDArray[np.uint8]] = deque(maxlen=MOST_KEPT)

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> npt.NDArray[Any]:
        """An array of this shape, not filled.

        Its memory is used again once the array is gone: code that refers to it must refer to the
        array itself, as `torch.from_numpy` does, and not to a part of it.
        """
        size = math.prod(shape) * dtype.itemsize
        if size < LARGE:
            return _new(shape, dtype)
        block = self._taken(size)
        if block is None:  # with room for a larger batch: what is not touched costs nothing
            block = _new((size + size // 8,), torch.uint8)
        kind = _new((0,), dtype).dtype
        array: npt.NDArray[Any] = block[:size].view(kind).reshape(shape)
        weakref.finalize(array, self._released.append, block).atexit = False
        return array

    def _taken(self, size: int) -> npt.NDArray[np.uint8] | None:
        """The smallest block for so many bytes, of at most twice as many; None where none is."""
        with self._lock:
            kept = [self._released.popleft() for _ in range(len(self._released))]
            fitting = [block for block in kept if size <= block.nbytes <= 2 * size]
            best = min(fitting, key=lambda block: block.nbytes, default=None)
            self._released.extend(block for block in kept if block is not best)
        return best


def _new(shape: Sequence[int], dtype: torch.dtype) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = torch.empty(*shape, dtype=dtype, device="cpu").numpy()
    return array
