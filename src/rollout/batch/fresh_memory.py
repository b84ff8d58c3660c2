"""Where the tensors of a batch lie: memory that torch takes from the system, seen as arrays.

NumPy asks for huge pages. Where the host of a virtual machine has taken back what nobody used, it
has to find each of them first: 500 ms for 1024 rows of 5120 tokens, at each batch. Small pages, of
which the machine mostly has enough at hand, take 85 ms, and 65 ms more than huge ones at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


def empty(shape: Sequence[int], dtype: torch.dtype = torch.int64) -> npt.NDArray[Any]:
    """An array of this shape, not filled."""
    array: npt.NDArray[Any] = torch.empty(*shape, dtype=dtype).numpy()
    return array


def zeros(shape: Sequence[int], dtype: torch.dtype = torch.int64) -> npt.NDArray[Any]:
    """The same of zeros."""
    array: npt.NDArray[Any] = torch.zeros(*shape, dtype=dtype).numpy()
    return array
