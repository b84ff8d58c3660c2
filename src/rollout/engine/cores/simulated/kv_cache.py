"""The memory of the simulated engine: tokens by request, and which prefixes are warm.

A sequence is a chain of whole blocks, each found by the block before it and its own tokens. A block
that a running request uses is *locked*; others are *warm*: they count as free memory, and the one
used longest ago goes first, the end of a chain before its beginning. What is past a request's last
whole block, and all that it generates, belongs to it alone until it ends.

Loaded in engine processes: imports the standard library only.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rollout.engine.cores.simulated.options import Kv


class Lease(NamedTuple):
    """What one running request holds.

    Attributes:
        blocks: The whole blocks of its sequence, by number.
        cached_tokens: Tokens of the sequence that were warm when it came.
    """

    blocks: list[int]
    cached_tokens: int


class KvCache:
    """Token-exact accounting of a memory."""

    def __init__(self, kv: Kv) -> None:
        self._capacity = kv.tokens
        self._block_tokens = kv.block_tokens
        self._has_prefix_cache = kv.prefix_cache
        self._locked_tokens = 0
        self._new_numbers = itertools.count()
        self._root = next(self._new_numbers)
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._keys: dict[int, tuple[int, bytes]] = {}  # the same, by number
        self._locks: Counter[int] = Counter()
        self._warm: OrderedDict[int, None] = OrderedDict()  # those used longest ago first

    @property
    def room(self) -> int:
        """Tokens that running requests can still take; warm blocks make way for them."""
        return self._capacity - self._locked_tokens

    @property
    def used_share(self) -> float:
        """Share of the capacity that running requests hold."""
        return self._locked_tokens / self._capacity

    def acquire(self, sequence: bytes, spare: int) -> Lease | None:
        """Hold a sequence (packed int32), or None where that would leave less than `spare` room."""
        count, size = len(sequence) // 4, self._block_tokens
        known = self._find_blocks(self._root, sequence, create=False)
        newly_locked = sum(block in self._warm for block in known) * size
        if count - len(known) * size + newly_locked + spare > self.room:
            return None
        blocks = self._find_blocks(self._root, sequence, create=True)
        for block in blocks:
            if not self._locks[block]:
                self._warm.pop(block, None)
                self._locked_tokens += size
            self._locks[block] += 1
        self.extend(count - len(blocks) * size)
        return Lease(blocks, min(len(known) * size, count - 1))

    def extend(self, tokens: int) -> None:
        """Running requests take `tokens` more, all together."""
        self._locked_tokens += tokens
        self._evict()

    def release(self, lease: Lease, sequence: bytes, *, keep: bool) -> None:
        """Give a lease back; `sequence` is all that it covers by now.

        With `keep` its whole blocks stay warm for requests that continue the sequence.
        """
        blocks, size = lease.blocks, self._block_tokens
        self._locked_tokens -= len(sequence) // 4 - len(blocks) * size
        for block in blocks:
            self._locks[block] -= 1
            if not self._locks[block]:
                del self._locks[block]
                self._locked_tokens -= size
        if keep:
            last = blocks[-1] if blocks else self._root
            rest = sequence[4 * size * len(blocks) :]
            blocks = blocks + self._find_blocks(last, rest, create=True)
        for block in reversed(blocks):
            if block not in self._locks:
                self._warm[block] = None
                self._warm.move_to_end(block)
        self._evict()

    def forget(self) -> None:
        """What is warm serves no request from now on."""
        self._root = next(self._new_numbers)

    def _find_blocks(self, block: int, sequence: bytes, *, create: bool) -> list[int]:
        """Whole blocks of a sequence that follows `block`, as far as they are known or created."""
        blocks: list[int] = []
        size = 4 * self._block_tokens
        stop = len(sequence) - size + 1 if self._has_prefix_cache else 0
        for start in range(0, stop, size):
            key = block, sequence[start : start + size]
            if key not in self._numbers:
                if not create:
                    break
                self._numbers[key] = next(self._new_numbers)
                self._keys[self._numbers[key]] = key
            block = self._numbers[key]
            blocks.append(block)
        return blocks

    def _evict(self) -> None:
        while len(self._warm) > self.room // self._block_tokens:
            block, _ = self._warm.popitem(last=False)
            del self._numbers[self._keys.pop(block)]
