"""The token histories that an engine's side keeps, so that a trajectory need not send them again.

Loaded in engine processes: imports the standard library only.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: The client and its trajectory.
HistoryKey = tuple[str, str]


class History:
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

        Prompts that have been handed out go on with the old bytes.
        """
        self.ids = self.ids[: 4 * length]
        self.sum = self.sums[length]
        self.sums = {at: total for at, total in self.sums.items() if at <= length}


class HistoryStore:
    """Histories by trajectory; the ones not used for longest go first.

    Args:
        max_bytes: Of all of them together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._histories: OrderedDict[HistoryKey, History] = OrderedDict()
        self.bytes = 0

    def prompt_of(
        self, key: HistoryKey, request_id: str, kept: int, kept_sum: int, new: bytes
    ) -> Callable[[], bytes] | None:
        """The whole prompt: the first `kept` tokens of the history, and `new` ones.

        None where there is no such history, or another one.
        """
        if not kept:
            self._drop(key)
            history = History(new, zlib.crc32(new), request_id)
            self._histories[key] = history
            self.bytes += len(new)
        else:
            found = self._histories.get(key)
            if found is None or not self._fits(found, kept, kept_sum):
                return None
            history = found
            self.bytes -= len(history.ids)
            if len(history.ids) != 4 * kept:
                history.cut(kept)
            history.extend(new)
            history.mark()
            history.owner = request_id
            self.bytes += len(history.ids)
            self._histories.move_to_end(key)
        prompt = history.prompt()
        self._shrink()
        return prompt

    def add(self, key: HistoryKey, request_id: str, ids: bytes) -> None:
        """The engine answered `ids`: the next request may build on them."""
        history = self._histories.get(key)
        if history is not None and history.owner == request_id and len(ids) % 4 == 0:
            history.extend(ids)
            self.bytes += len(ids)
            self._shrink()

    def drop_client(self, client: str) -> None:
        """Forget the histories of a client."""
        for key in [key for key in self._histories if key[0] == client]:
            self._drop(key)

    def _fits(self, history: History, kept: int, kept_sum: int) -> bool:
        if len(history.ids) == 4 * kept:
            return history.sum == kept_sum
        return history.sums.get(kept) == kept_sum

    def _drop(self, key: HistoryKey) -> None:
        history = self._histories.pop(key, None)
        if history is not None:
            self.bytes -= len(history.ids)

    def _shrink(self) -> None:
        while self.bytes > self._max_bytes:
            _, oldest = self._histories.popitem(last=False)
            self.bytes -= len(oldest.ids)
