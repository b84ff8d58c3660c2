"""Token ids that only ever grow, with a running checksum: what a trajectory's requests are made of.

A request for turn 64 must not cost more than one for turn 2 with as many new tokens. So no code
copies or scans the whole prefix at a turn: it is summed once, as it grows, checked once, and a
replica is sent only what it does not have.
"""

from __future__ import annotations

import zlib
from array import array


class TokenPrefix:
    """Append-only token ids.

    Attributes:
        ids: All of them, packed; change it by `extend` only.
        sent_to: How many of the first ids each channel's replica has, by the channel's key.
        checked: How many of the first ids are known to lie in the engines' vocabulary.
    """

    __slots__ = ("_sum", "_sums", "checked", "ids", "sent_to")

    def __init__(self) -> None:
        self.ids: array[int] = array("i")
        self.sent_to: dict[str, int] = {}
        self.checked = 0
        self._sum = 0
        self._sums = {0: 0}

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, ids: array[int]) -> None:
        """Append packed ids."""
        self.ids.extend(ids)
        self._sum = zlib.crc32(ids, self._sum)
        self._sums[len(self.ids)] = self._sum

    def sum_of(self, length: int) -> int | None:
        """CRC-32 of the first `length` ids; None where no `extend` ended there."""
        return self._sums.get(length)

    def packed(self, start: int = 0, stop: int | None = None) -> bytes:
        """The ids from index `start` up to `stop`, int32 little-endian."""
        return self.ids[start:stop].tobytes()
