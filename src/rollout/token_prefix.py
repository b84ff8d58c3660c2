"""Token ids that only ever grow: what a trajectory's requests are made of.

Each id is checked and summed once, however many turns the trajectory has.
"""

from __future__ import annotations

import zlib
from array import array
from contextlib import suppress

import msgspec

#: Ids that are more than this are looked at by NumPy.
LONG_BYTES = 4 * 128


class TokenPrefix(msgspec.Struct, eq=False, gc=False):
    """Append-only token ids, held as the pieces in which they came.

    A piece is never changed: trajectories may share the beginning of their prompts.

    Attributes:
        checked: How many of the first ids are known to lie in the engines' vocabulary.
        length: How many ids there are. `len` makes another number for each who keeps it.
        pieces: All ids, packed, as they were appended; to be read.
    """

    checked: int = 0
    length: int = 0
    pieces: list[bytes] = []
    _sum: int = 0  # of the first `_summed` ids
    _summed: int = 0

    def __len__(self) -> int:
        return self.length

    @property
    def ids(self) -> array[int]:
        """A copy of all of them."""
        return self.slice()

    def slice(self, start: int = 0, stop: int | None = None) -> array[int]:
        """A copy of the ids from index `start` up to `stop`."""
        return array("i", self.packed(start, stop))

    def extend(self, ids: array[int] | bytes) -> None:
        """Append packed ids, int32; bytes are kept as they are."""
        piece = ids if isinstance(ids, bytes) else ids.tobytes()
        if piece:
            self.pieces.append(piece)
            self.length += len(piece) // 4

    def compute_sum(self) -> int:
        """CRC-32 of all ids; those that were there the last time are not read again."""
        self._sum = zlib.crc32(self.packed(self._summed), self._sum)
        self._summed = self.length
        return self._sum

    def packed(self, start: int = 0, stop: int | None = None) -> bytes:
        """The ids from index `start` up to `stop`, int32 little-endian."""
        stop = self.length if stop is None else stop
        newest = self.pieces[-1:]
        if stop == self.length and newest and start == stop - len(newest[0]) // 4:  # as a rule
            return newest[0]
        return b"".join(self.pieces)[4 * start : 4 * stop]


def find_outside_id(ids: bytes, vocab_size: int) -> int | None:
    """Position of the first of packed ids outside [0, vocab_size); None where all fit.

    Args:
        vocab_size: 0 where it is not known, and only negative ids are outside.
    """
    most = vocab_size or 2**31  # where negative ids are large
    if _find_largest(ids) < most:
        return None
    return next(at for at, token in enumerate(memoryview(ids).cast("I")) if token >= most)


def _find_largest(ids: bytes) -> int:
    """The largest of packed ids, negative ones taken for large; 0 of none."""
    if len(ids) > LONG_BYTES:
        with suppress(ImportError):  # engine processes may lack it
            import numpy as np

            return int(np.maximum.reduce(np.frombuffer(ids, "<u4")))
    return max(memoryview(ids).cast("I"), default=0)
