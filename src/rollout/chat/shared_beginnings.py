"""What prompts begin with is held once: thousands have the same system message and tools."""

from __future__ import annotations

from collections import deque

#: Beginnings that are remembered, the latest; shorter ones are not worth it, in bytes of ids.
MOST, LEAST_BYTES = 32, 128
#: What follows a known beginning is looked at for a longer one where it is of so many bytes.
MUCH_BYTES = 1024


class SharedBeginnings:
    """Beginnings of prompts, each found where two prompts that came after each other had it."""

    def __init__(self) -> None:
        self._known: deque[bytes] = deque(maxlen=MOST)
        self._last = b""

    def pieces(self, packed: bytes) -> tuple[bytes, ...]:
        """The prompt's ids in pieces, the first of which others may hold too.

        Args:
            packed: int32.
        """
        last, self._last = self._last, packed
        if packed == last:  # another member of the group
            self._last = last
            return (last,)
        found = max((each for each in self._known if packed.startswith(each)), key=len, default=b"")
        if not found or len(packed) - len(found) >= MUCH_BYTES:
            common = packed[: 4 * _common_length(packed, last)]
            if len(common) >= len(found) + LEAST_BYTES:
                found = common
                self._known.append(found)
        return tuple(piece for piece in (found, packed[len(found) :]) if piece)


def _common_length(one: bytes, other: bytes) -> int:
    """How many ids both begin with."""
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if one[4 * low : 4 * middle] == other[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
