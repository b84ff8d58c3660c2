"""A request on the engine's side, and the tokens of its answer that wait for more.

Loaded in engine processes: imports msgspec only.
"""

from __future__ import annotations

import math

import msgspec

from rollout.engine.core import Chunk, GenerationRequest


class Running(msgspec.Struct, eq=False):
    """A request that the core works on, or that waits for its turn to be given to it.

    Attributes:
        is_aborted: Its end was asked for before the core had it.
        answered: Tokens of its answer that have been added to the prefix.
        buffered: Tokens that wait for more before they are sent, until `buffered_until`.
        deadline: Clock time at which it is aborted.
    """

    request: GenerationRequest
    deadline: float
    has_prefix: bool
    is_aborted: bool = False
    is_started: bool = False
    answered: int = 0
    buffered: list[Chunk] = []
    buffered_until: float = math.inf

    def gather(self, chunk: Chunk, interval: int) -> tuple[Chunk, ...]:
        """What is to be sent now that this chunk has come; the rest is buffered.

        Args:
            interval: Tokens that are sent together.
        """
        is_last = chunk.finish_reason is not None
        if not _is_whole(chunk):  # the client refuses it, and must not refuse others with it
            return (*self.take_buffered(), chunk)
        if not self.buffered and (is_last or len(chunk.ids) >= 4 * interval):
            return (chunk,)
        before: tuple[Chunk, ...] = ()
        if self.buffered and not _continues(self.buffered[-1], chunk):
            before = self.take_buffered()
        self.buffered.append(chunk)
        count = sum(len(each.ids) for each in self.buffered) // 4
        if is_last or count >= interval:
            return (*before, *self.take_buffered())
        return before

    def take_buffered(self) -> tuple[Chunk, ...]:
        """The tokens that waited for more, in one chunk; none where none did."""
        if not self.buffered:
            return ()
        chunk = _joined(self.buffered)
        self.buffered.clear()
        self.buffered_until = math.inf
        return (chunk,)


def _is_whole(chunk: Chunk) -> bool:
    return len(chunk.log_probs) == len(chunk.ids) and len(chunk.top_log_probs) == len(chunk.top_ids)


def _continues(last: Chunk, chunk: Chunk) -> bool:
    return (
        chunk.offset == last.offset + len(last.ids) // 4
        and chunk.weight_version == last.weight_version
    )


def _joined(chunks: list[Chunk]) -> Chunk:
    """One chunk that says what these say, which follow each other."""
    if len(chunks) == 1:
        return chunks[0]
    return msgspec.structs.replace(
        chunks[-1],
        offset=chunks[0].offset,
        **{
            name: b"".join(getattr(chunk, name) for chunk in chunks)
            for name in ("ids", "log_probs", "top_ids", "top_log_probs", "routed_experts")
        },
    )
