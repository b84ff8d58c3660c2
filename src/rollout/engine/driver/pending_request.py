"""The record of a request under way on a channel."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import msgspec

from rollout.bridge import loop_clock
from rollout.engine.core import Chunk, FinishReason
from rollout.engine.driver.generation import ChunkFault, Generation, Part, TokenCounts
from rollout.engine.driver.token_ids import outside
from rollout.engine.routing import Dispatch
from rollout.medium import PlacedMedia


class PendingRequest(msgspec.Struct, eq=False, gc=False, kw_only=True):
    """A request under way: `done` fires at its last chunk or when the channel is lost.

    Attributes:
        generation: Filled as chunks come, also of an aborted request; None once no caller waits
            for them any more.
        part: What this request gave to it.
        on_gone: Called with it, once, when the engine no longer works on it.
        counts: Of the replica.
        vocab_size: Of the engine.
        dispatch: Where it was placed, for `on_gone`.
        finish_reason: How it ended, where its last chunk was taken; None until then.
        error: Why the engine refused or failed it; empty otherwise.
        is_lost: The channel was lost under it.
        is_garbled: The engine's answer contradicted itself; what came before stays.
        media: The images and videos of its prompt; sent where the engine asks for them.
        first_at: When its first tokens came, on the loop's clock; None before, and where none came
            before it was cancelled.
    """

    generation: Generation | None
    part: Part
    on_gone: Callable[[PendingRequest], None]
    counts: TokenCounts
    vocab_size: int = 0
    deadline: float
    dispatch: Dispatch | None = None
    done: anyio.Event = msgspec.field(default_factory=anyio.Event)
    finish_reason: FinishReason | None = None
    error: str = ""
    is_lost: bool = False
    is_garbled: bool = False
    media: tuple[PlacedMedia, ...] = ()
    first_at: float | None = None

    @property
    def request_id(self) -> str:
        """Its key on the wire."""
        return self.part.request_id

    def take(self, chunk: Chunk) -> bool:
        """Append the tokens of a chunk to the generation; False where it contradicts itself."""
        if self.generation is None or self.is_garbled:
            self.counts.late += len(chunk.ids) // 4
            return True
        try:
            fault = outside(chunk.ids, self.vocab_size) if chunk.ids else ""
            if fault:
                raise ChunkFault(fault)
            count = self.generation.take(chunk)
        except ChunkFault as fault:
            self.counts.refused += len(chunk.ids) // 4
            self.error = f"{self.part.replica} sent a faulty chunk: {fault}"
            self.is_garbled = True
            self.done.set()
            return False
        if count:
            self.counts.taken += count
        else:
            self.counts.repeated += len(chunk.ids) // 4
        if self.first_at is None and self.part.count:
            self.first_at = loop_clock()()
        if chunk.finish_reason is not None:
            self.finish_reason, self.error = chunk.finish_reason, chunk.error
        return True

    def end(self, lost_reason: str) -> None:
        """The engine no longer works on it, or its channel is lost."""
        self.is_lost = bool(lost_reason)
        self.error = self.error or lost_reason
        self.on_gone(self)
        self.done.set()
