"""Token ids that only ever grow, with a running checksum: what a trajectory's requests are made of.

A request for turn 64 must not cost more than one for turn 2 with as many new tokens. So no code
copies or scans the whole prefix at a turn: it is summed once, as it grows, checked once, and a
replica is sent only what it does not have.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left, bisect_right

_SUM_BITS = 32
_SUM_MASK = (1 << _SUM_BITS) - 1


class TokenPrefix:
    """Append-only token ids, held as the pieces in which they came.

    A piece is never moved or changed: nothing is allocated beyond its size, and trajectories may
    share the beginning of their prompts.

    Attributes:
        checked: How many of the first ids are known to lie in the engines' vocabulary.
    """

    __slots__ = ("_ends", "_others", "_pieces", "_sent", "_session", "checked")

    def __init__(self) -> None:
        self.checked = 0
        self._pieces: list[bytes] = []
        #: Where each piece ends, and the sum up to there in the lower half.
        self._ends = array("Q")
        #: What the replica has that was asked last; of earlier ones in `_others`.
        self._session, self._sent = "", 0
        self._others: dict[str, int] | None = None

    def __len__(self) -> int:
        return self._ends[-1] >> _SUM_BITS if self._ends else 0

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
            end = self._ends[-1] if self._ends else 0
            length = (end >> _SUM_BITS) + len(piece) // 4
            self._pieces.append(piece)
            self._ends.append(length << _SUM_BITS | zlib.crc32(piece, end & _SUM_MASK))

    def sum_of(self, length: int) -> int | None:
        """CRC-32 of the first `length` ids; None where no `extend` ended there."""
        if not length:
            return 0
        at = bisect_left(self._ends, length << _SUM_BITS)
        if at == len(self._ends) or self._ends[at] >> _SUM_BITS != length:
            return None
        return self._ends[at] & _SUM_MASK

    def packed(self, start: int = 0, stop: int | None = None) -> bytes:
        """The ids from index `start` up to `stop`, int32 little-endian."""
        stop = len(self) if stop is None else min(stop, len(self))
        if start >= stop:
            return b""
        first = bisect_right(self._ends, start << _SUM_BITS | _SUM_MASK)
        last = bisect_left(self._ends, stop << _SUM_BITS)
        pieces = self._pieces
        found = pieces[first] if first == last else b"".join(pieces[first : last + 1])
        begun = self._ends[first - 1] >> _SUM_BITS if first else 0
        return found[4 * (start - begun) : 4 * (stop - begun)]

    def sent_to(self, session: str) -> int:
        """How many of the first ids a channel's replica has, by the channel's key."""
        if session == self._session:
            return self._sent
        return 0 if self._others is None else self._others.get(session, 0)

    def note_sent(self, session: str, count: int) -> None:
        """A channel's replica has the first `count` ids now."""
        if self._session not in ("", session):
            self._others = {**(self._others or {}), self._session: self._sent}
        self._session, self._sent = session, count
