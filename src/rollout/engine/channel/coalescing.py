"""Partial answers of a request that wait for more tokens before they are sent.

Loaded in engine processes: imports msgspec only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rollout.engine.core import Chunk

#: Fields of a chunk whose bytes follow each other when chunks are joined.
_PACKED = ("ids", "log_probs", "top_ids", "top_log_probs", "routed_experts")


class ChunkCoalescer:
    """Joins chunks of one request until they have enough tokens.

    Args:
        interval: Tokens that are sent together.
    """

    __slots__ = ("_interval", "_waiting")

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._waiting: list[Chunk] = []

    @property
    def is_empty(self) -> bool:
        """Whether no token waits."""
        return not self._waiting

    def add(self, chunk: Chunk) -> list[Chunk]:
        """Return what is to be sent now that this chunk has come; the rest waits."""
        is_enough = chunk.finish_reason is not None or len(chunk.ids) >= 4 * self._interval
        if is_enough and not self._waiting:
            return [chunk]
        if not _is_sound(chunk):  # the client refuses it, and must not refuse others with it
            return [*self.flush(), chunk]
        ready: list[Chunk] = []
        if self._waiting and not _continues(self._waiting[-1], chunk):
            ready = self.flush()
        self._waiting.append(chunk)
        count = sum(len(each.ids) for each in self._waiting) // 4
        if is_enough or count >= self._interval:
            ready += self.flush()
        return ready

    def flush(self) -> list[Chunk]:
        """Return what waits as one chunk, or nothing."""
        waiting, self._waiting = self._waiting, []
        if len(waiting) <= 1:
            return waiting
        joined = {name: b"".join(getattr(each, name) for each in waiting) for name in _PACKED}
        return [msgspec.structs.replace(waiting[-1], offset=waiting[0].offset, **joined)]


def _is_sound(chunk: Chunk) -> bool:
    return len(chunk.log_probs) == len(chunk.ids) and len(chunk.top_log_probs) == len(chunk.top_ids)


def _continues(last: Chunk, chunk: Chunk) -> bool:
    return (
        chunk.offset == last.offset + len(last.ids) // 4
        and chunk.weight_version == last.weight_version
    )
