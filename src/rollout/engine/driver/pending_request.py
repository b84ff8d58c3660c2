"""A request under way on a channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import anyio
import msgspec

from rollout.engine.core import Chunk, FinishReason
from rollout.engine.pool.generation import ChunkFault, Generation, Part, TokenCounts
from rollout.engine.driver.token_ids import outside
from rollout.engine.routing import Dispatch
from rollout.engine.wire.protocol import Submit
from rollout.medium import PlacedMedia
from rollout.token_prefix import TokenPrefix


class Asker(Protocol):
    """Makes the message of a request, so that nobody needs to keep it."""

    def submit(self, request_id: str) -> Submit:
        """The same message each time."""


class PendingRequest(msgspec.Struct, eq=False, gc=False):
    """A request under way: `done` fires at its last chunk or when the channel is lost.

    Attributes:
        asked: The request itself; or what makes it again, where an engine lacks what it builds on.
        prefix: The prompt, where it is not in the message; its first `sent_tokens` tokens.
        generation: Filled as chunks come, also of an abandoned request; None once no caller waits
            for them any more.
        part: What this request gave to it.
        on_gone: Called with it, once, when the engine no longer works on it.
        dispatch: Where it was placed, for `on_gone`.
        finish_reason: How it ended, where its last chunk was taken; None until then.
        error: Why the engine refused or failed it; empty otherwise.
        is_lost: The channel was lost under it.
        is_garbled: The engine's answer contradicted itself; what came before stays.
        media: The images and videos of its prompt; sent where the engine asks for them.
        first_at: When its first tokens came, on the loop's clock; None before, and where none came
            before it was cancelled.
    """

    asked: Submit | Asker
    prefix: TokenPrefix | None
    sent_tokens: int
    deadline: float
    generation: Generation | None
    part: Part
    on_gone: Callable[[PendingRequest], None]
    done: anyio.Event
    dispatch: Dispatch | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    is_lost: bool = False
    is_garbled: bool = False
    media: tuple[PlacedMedia, ...] = ()
    first_at: float | None = None

    def take(self, chunk: Chunk, vocab_size: int, counts: TokenCounts) -> None:
        """Append the tokens of a chunk to the generation, and count them.

        Raises:
            ChunkFault: It contradicts itself or what came before it; nothing was taken.
        """
        assert self.generation is not None
        fault = outside(chunk.ids, vocab_size) if chunk.ids else ""
        if fault:
            raise ChunkFault(fault)
        count = self.generation.take(chunk)
        self.finish_reason = chunk.finish_reason
        if count:
            counts.taken += count
        else:
            counts.repeated += len(chunk.ids) // 4

    def lacking(self, session: str, *, whole: bool) -> tuple[int, int, bytes]:
        """How much of its prefix a channel's replica has, the sum of that, and what follows."""
        assert self.prefix is not None
        kept = 0 if whole else self.prefix.sent_to(session)
        if kept >= self.sent_tokens:
            kept = 0
        summed = self.prefix.compute_sum(kept) if kept else 0
        return kept, summed, self.prefix.packed(kept, self.sent_tokens)

    @property
    def request_id(self) -> str:
        """Its key on the wire."""
        return self.part.request_id

    def message(self) -> Submit:
        """The request itself, which then is to be told how much of its prefix is lacking."""
        asked = self.asked
        message = asked if isinstance(asked, Submit) else asked.submit(self.request_id)
        message.has_prefix = self.prefix is not None
        if self.media:
            message.media = tuple((m.medium.digest, m.start, m.count) for m in self.media)
        return message
