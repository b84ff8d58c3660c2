"""The memory of the simulated engine: tokens by request, and which prefixes are warm.

Sequences are kept as a tree of whole blocks. A block that a running request uses is *locked*;
others are *warm*: they count as free memory, and the least recently used leaf goes first. What is
past a request's last whole block, and all that it generates, belongs to it alone until it ends.

Loaded in engine processes: imports the standard library only.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise


class _Block:
    __slots__ = ("children", "key", "locks", "parent", "used")

    def __init__(self, key: bytes, parent: _Block | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[bytes, _Block] = {}
        self.locks = 0
        self.used = 0


class Lease:
    """What one running request holds.

    Attributes:
        cached_tokens: Tokens of its sequence that were warm when it came.
    """

    __slots__ = ("blocks", "cached_tokens")

    def __init__(self, blocks: list[_Block], cached_tokens: int) -> None:
        self.blocks = blocks
        self.cached_tokens = cached_tokens


class KvCache:
    """Token-exact accounting of `tokens` places."""

    def __init__(self, *, tokens: int, block_tokens: int, prefix_cache: bool) -> None:
        self._capacity = tokens
        self._block_tokens = block_tokens
        self._has_prefix_cache = prefix_cache
        self._root = _Block(b"", None)
        self._locked_tokens = 0
        self._warm_blocks = 0
        self._clock = 0
        self._salt = b""
        self._leaves: OrderedDict[_Block, None] = OrderedDict()  # the warm ones, oldest use first

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
        count = len(sequence) // 4
        keys = self._keys(sequence)
        path = self._walk(keys)
        newly_locked = sum(block.locks == 0 for block in path) * self._block_tokens
        if count - len(path) * self._block_tokens + newly_locked + spare > self.room:
            return None
        cached = min(len(path) * self._block_tokens, count - 1)
        path += self._grow_tree(path[-1] if path else self._root, keys[len(path) :])
        self._clock += 1
        for block in path:
            self._lock(block)
        self.extend(count - len(path) * self._block_tokens)
        return Lease(path, cached)

    def extend(self, tokens: int) -> None:
        """Running requests take `tokens` more, all together."""
        self._locked_tokens += tokens
        self._evict()

    def release(self, lease: Lease, sequence: bytes, *, keep: bool) -> None:
        """Give a lease back; `sequence` is all that it covers by now.

        With `keep` its whole blocks stay warm for requests that continue the sequence.
        """
        count = len(sequence) // 4
        self._locked_tokens -= count - len(lease.blocks) * self._block_tokens
        self._clock += 1
        for block in reversed(lease.blocks):
            self._unlock(block)
        if keep:
            last = lease.blocks[-1] if lease.blocks else self._root
            path = self._grow_tree(last, self._keys(sequence)[len(lease.blocks) :])
            for block in reversed(path):
                block.used = self._clock
                self._offer(block)
            self._evict()

    def forget(self, salt: bytes) -> None:
        """What is warm serves no request from now on; `salt` must be a new one."""
        self._salt = salt

    def _keys(self, sequence: bytes) -> list[bytes]:
        if not self._has_prefix_cache:
            return []
        size = 4 * self._block_tokens
        ends = range(0, len(sequence) + 1, size)
        return [self._salt + sequence[at:end] for at, end in pairwise(ends)]

    def _walk(self, keys: list[bytes]) -> list[_Block]:
        path, block = [], self._root
        for key in keys:
            child = block.children.get(key)
            if child is None:
                break
            path.append(child)
            block = child
        return path

    def _grow_tree(self, block: _Block, keys: list[bytes]) -> list[_Block]:
        """The blocks of `keys` below `block`; new ones begin warm."""
        path = []
        for key in keys:
            child = block.children.get(key)
            if child is None:
                child = block.children[key] = _Block(key, block)
                self._leaves.pop(block, None)
                self._warm_blocks += 1
            path.append(child)
            block = child
        return path

    def _lock(self, block: _Block) -> None:
        block.used = self._clock
        block.locks += 1
        self._leaves.pop(block, None)
        if block.locks == 1:
            self._warm_blocks -= 1
            self._locked_tokens += self._block_tokens

    def _unlock(self, block: _Block) -> None:
        block.used = self._clock
        block.locks -= 1
        if block.locks == 0:
            self._warm_blocks += 1
            self._locked_tokens -= self._block_tokens
            self._offer(block)

    def _offer(self, block: _Block) -> None:
        """Count a block among the leaves that may go, if it is one, as the last used."""
        if block.locks == 0 and not block.children:
            self._leaves[block] = None
            self._leaves.move_to_end(block)

    def _evict(self) -> None:
        limit = self.room // self._block_tokens
        while self._warm_blocks > limit:
            block, _ = self._leaves.popitem(last=False)
            parent = block.parent
            assert parent is not None
            del parent.children[block.key]
            self._warm_blocks -= 1
            if parent is not self._root:
                self._offer(parent)
                if parent.used == block.used and parent in self._leaves:
                    self._leaves.move_to_end(parent, last=False)
