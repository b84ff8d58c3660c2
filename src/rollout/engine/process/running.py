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
        answered: Tokens of its answer that have been added to the history.
        held: Tokens that wait for more before they are sent, until `held_until`.
        deadline: Clock time at which it is aborted.
    """

    request: GenerationRequest
    deadline: float
    has_history: bool
    is_aborted: bool = False
    is_started: bool = False
    answered: int = 0
    held: list[Chunk] = []
    held_until: float = math.inf

    def gather(self, chunk: Chunk, interval: int) -> tuple[Chunk, ...]:
        """What is to be sent now that this chunk has come; the rest is held.

        Args:
            interval: Tokens that are sent together.
        """
        is_last = chunk.finish_reason is not None
        if not _is_whole(chunk):  # the client refuses it, and must not refuse others with it
            return (*self.release(), chunk)
        if not self.held and (is_last or len(chunk.ids) >= 4 * interval):
            return (chunk,)
        before: tuple[Chunk, ...] = ()
        if self.held and not _continues(self.held[-1], chunk):
            before = self.release()
        self.held.append(chunk)
        count = sum(len(each.ids) for each in self.held) // 4
        if is_last or count >= interval:
            return (*before, *self.release())
        return before

    def release(self) -> tuple[Chunk, ...]:
        """The tokens that waited for more, in one chunk; none where none did."""
        if not self.held:
            return ()
        chunk = _joined(self.held)
        self.held.clear()
        self.held_until = math.inf
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
