"""Consistent hashing (Karger et al. 1997): adding or removing a replica moves few keys.

Each replica owns points on a ring; a key belongs to the next point clockwise. The hash is BLAKE2b,
so the same in every process, unlike Python's own.
"""

from __future__ import annotations

import bisect
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.engine.routing.replica_state import ReplicaState

#: Points of a replica of weight 1; its share of the keys then varies by about a twelfth.
POINTS = 160


class HashRing:
    """The ring of some replicas, points in proportion to their weights."""

    def __init__(self, replicas: Sequence[ReplicaState]) -> None:
        points = [
            (stable_hash(f"{replica.name}#{number}"), replica.name, replica)
            for replica in replicas
            for number in range(max(1, round(POINTS * replica.weight)))
        ]
        points.sort(key=lambda point: point[:2])
        self._keys = [point for point, _, _ in points]
        self._owners = [replica for _, _, replica in points]

    def find(self, key: str, may_own: Callable[[ReplicaState], bool]) -> ReplicaState | None:
        """The owner of a key; where it may not, the next clockwise that may, or None."""
        start = bisect.bisect_left(self._keys, stable_hash(key))
        for index in range(start - len(self._owners), start):
            if may_own(self._owners[index]):
                return self._owners[index]
        return None


def stable_hash(text: str) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
