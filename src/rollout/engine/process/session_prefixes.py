"""The token prefixes that an engine's side keeps, so that a trajectory need not send them again.

Loaded in engine processes: imports the standard library only.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: The client and its trajectory.
PrefixKey = tuple[str, str]


class SessionPrefix:
    """The ids of one trajectory, packed, and the request that may add to them.

    Attributes:
        sums: CRC-32 by length in tokens, where a request can build on it.
        owner: Id of the request whose answer is being added; empty when there is none.
    """

    __slots__ = ("ids", "owner", "sum", "sums")

    def __init__(self, ids: bytes, total: int, owner: str) -> None:
        self.ids = bytearray(ids)
        self.sum = total
        self.sums = {len(ids) // 4: total}
        self.owner = owner

    def prompt(self) -> Callable[[], bytes]:
        """What there is now, as bytes when they are wanted: most of it is old."""
        ids, end = self.ids, len(self.ids)
        return lambda: bytes(ids) if len(ids) == end else bytes(memoryview(ids)[:end])

    def extend(self, ids: bytes) -> None:
        """Append packed ids."""
        self.ids += ids
        self.sum = zlib.crc32(ids, self.sum)

    def mark(self) -> None:
        """Let the next request build on what there is now."""
        self.sums[len(self.ids) // 4] = self.sum

    def cut(self, length: int) -> None:
        """Forget everything from token `length` on, where a mark is.

        Prompts that have been handed out keep the old bytes.
        """
        self.ids = self.ids[: 4 * length]
        self.sum = self.sums[length]
        self.sums = {at: total for at, total in self.sums.items() if at <= length}


class PrefixStore:
    """Prefixes by trajectory; the ones not used for longest go first.

    Args:
        max_bytes: Of all of them together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prefixes: OrderedDict[PrefixKey, SessionPrefix] = OrderedDict()
        self.bytes = 0

    def prompt_of(
        self, key: PrefixKey, request_id: str, kept: int, kept_sum: int, new: bytes
    ) -> Callable[[], bytes] | None:
        """The whole prompt: the first `kept` tokens of the prefix, and `new` ones.

        None where there is no such prefix, or another one.
        """
        if not kept:
            self._drop(key)
            prefix = SessionPrefix(new, zlib.crc32(new), request_id)
            self._prefixes[key] = prefix
            self.bytes += len(new)
        else:
            found = self._prefixes.get(key)
            if found is None or not self._fits(found, kept, kept_sum):
                return None
            prefix = found
            self.bytes -= len(prefix.ids)
            if len(prefix.ids) != 4 * kept:
                prefix.cut(kept)
            prefix.extend(new)
            prefix.mark()
            prefix.owner = request_id
            self.bytes += len(prefix.ids)
            self._prefixes.move_to_end(key)
        prompt = prefix.prompt()
        self._shrink()
        return prompt

    def add(self, key: PrefixKey, request_id: str, ids: bytes) -> None:
        """The engine answered `ids`: the next request may build on them."""
        prefix = self._prefixes.get(key)
        if prefix is not None and prefix.owner == request_id and len(ids) % 4 == 0:
            prefix.extend(ids)
            self.bytes += len(ids)
            self._shrink()

    def drop_client(self, client: str) -> None:
        """Forget the prefixes of a client."""
        for key in [key for key in self._prefixes if key[0] == client]:
            self._drop(key)

    def _fits(self, prefix: SessionPrefix, kept: int, kept_sum: int) -> bool:
        if len(prefix.ids) == 4 * kept:
            return prefix.sum == kept_sum
        return prefix.sums.get(kept) == kept_sum

    def _drop(self, key: PrefixKey) -> None:
        prefix = self._prefixes.pop(key, None)
        if prefix is not None:
            self.bytes -= len(prefix.ids)

    def _shrink(self) -> None:
        while self.bytes > self._max_bytes:
            _, oldest = self._prefixes.popitem(last=False)
            self.bytes -= len(oldest.ids)
