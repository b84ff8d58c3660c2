"""One generation as the driver sees it: the tokens that arrived, whatever became of the wait."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from functools import partial
from typing import cast

import attrs
import msgspec

from rollout.engine.core import Chunk, FinishReason
from rollout.limits import PausableDeadline

logger = logging.getLogger("rollout.engine")


@attrs.define
class TokenCounts:
    """What became of the tokens that arrived from a replica, each counted once.

    Attributes:
        taken: Appended to a `Generation`.
        late: Of a request that no caller waited for any more.
        repeated: Of a chunk that had been taken before, or of a request that had ended.
        refused: Of a faulty chunk.
    """

    taken: int = 0
    late: int = 0
    repeated: int = 0
    refused: int = 0

    @property
    def arrived(self) -> int:
        """All of them."""
        return self.taken + self.late + self.repeated + self.refused


_log_probs = cast("Callable[[], array[float]]", partial(array, "f"))


class ChunkFault(Exception):
    """A chunk contradicts what came before it: the engine is at fault and nothing was taken."""


class Part(msgspec.Struct, eq=False):
    """What one request gave to a generation; a recovered generation is made of several.

    Attributes:
        replica: The one that was asked.
        start: Where its tokens begin in the generation.
        count: Tokens taken from it.
        is_discarded: The generation restarted after it; its tokens are dropped.
    """

    request_id: str
    replica: str
    start: int
    count: int = 0
    is_discarded: bool = False


class Generation(msgspec.Struct, eq=False):
    """Sampled tokens in the order in which they were sampled, packed.

    Filled in place while requests run, so that a cancelled wait loses nothing.

    Attributes:
        ids: Sampled ids.
        log_probs: One for each id.
        versions: Runs ``[weight version, number of ids]``.
        finish_reason: None until the last chunk has come.
        cached_tokens: Prompt tokens that the engine did not need to prefill.
        parts: The requests made for it, in order; more than one where replicas were lost.
        resumes: How often it resumed elsewhere from the tokens it had.
        restarts: Why it restarted, each time it did.
        top_ids: Where asked for, int32: the k most likely ids at each position, likeliest first.
        top_log_probs: float32, one for each of `top_ids`.
        routed_experts: Where asked for, the raw bytes in which the engine says it.
        pausable_deadlines: Paused while the runtime lets it wait.
        on_tokens: Readers, each called with it at each chunk that brings tokens or the end; one
            that raises is logged and not called again. After a restart the tokens are fewer.
    """

    parts: list[Part] = []
    ids: array[int] = msgspec.field(default_factory=partial(array, "i"))
    log_probs: array[float] = msgspec.field(default_factory=_log_probs)
    versions: list[list[int]] = []
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    resumes: int = 0
    restarts: list[str] = []
    top_ids: bytes = b""
    top_log_probs: bytes = b""
    routed_experts: bytes = b""
    pausable_deadlines: tuple[PausableDeadline, ...] = ()
    on_tokens: list[Callable[[Generation], object]] = []

    @property
    def replica(self) -> str:
        """Name of the engine that was asked last; empty before the first request."""
        return self.parts[-1].replica if self.parts else ""

    @property
    def request_id(self) -> str:
        """Of the request that was made last; empty before the first one."""
        return self.parts[-1].request_id if self.parts else ""

    @property
    def discarded_tokens(self) -> int:
        """Tokens that were taken and dropped when it restarted."""
        return sum(part.count for part in self.parts if part.is_discarded)

    def begin(self, request_id: str, replica: str) -> Part:
        """What is taken from now on comes from this request, after the tokens there are."""
        self.finish_reason = None
        part = Part(request_id, replica, len(self.ids))
        self.parts.append(part)
        return part

    def restart(self, reason: str) -> None:
        """Forget the tokens, before the request is made again from its start."""
        for part in self.parts:
            part.is_discarded = True
        self.restarts.append(reason)
        self.ids, self.log_probs, self.versions = array("i"), array("f"), []
        self.finish_reason, self.cached_tokens = None, 0
        self.top_ids = self.top_log_probs = self.routed_experts = b""

    def take(self, chunk: Chunk) -> int:
        """Append a chunk's tokens; how many, 0 where all were taken before.

        Raises:
            ChunkFault: Tokens are missing before it, or its log-probs do not match its ids; nothing
                was taken.
        """
        ids, size = chunk.ids, len(chunk.ids)
        if size % 4 or len(chunk.log_probs) != size:
            raise ChunkFault(f"{size} bytes of ids with {len(chunk.log_probs)} bytes of log-probs")
        has_more = chunk.top_ids or chunk.top_log_probs or chunk.routed_experts
        if has_more:
            _check_top(chunk)
        part = self.parts[-1] if self.parts else self.begin("", "")  # else filled by hand
        had, count = part.count, 0
        if chunk.offset == had:
            count = size // 4
            if has_more:
                self.top_ids += chunk.top_ids
                self.top_log_probs += chunk.top_log_probs
                self.routed_experts += chunk.routed_experts
        elif chunk.offset > had:
            raise ChunkFault(f"tokens {had} to {chunk.offset} are missing")
        if count:
            self.ids.frombytes(ids)
            self.log_probs.frombytes(chunk.log_probs)
            part.count = had + count
            versions = self.versions
            if versions and versions[-1][0] == chunk.weight_version:
                versions[-1][1] += count
            else:
                versions.append([chunk.weight_version, count])
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self.cached_tokens = chunk.cached_tokens
        if self.on_tokens and (count or chunk.finish_reason is not None):
            self._tell()
        return count

    def _tell(self) -> None:
        for reader in tuple(self.on_tokens):
            try:
                reader(self)
            except Exception:
                logger.exception("a reader of tokens raised; it is not called again")
                self.on_tokens.remove(reader)


def _check_top(chunk: Chunk) -> None:
    size = len(chunk.top_ids)
    if size % 4 or len(chunk.top_log_probs) != size:
        raise ChunkFault(
            f"{size} bytes of top ids with {len(chunk.top_log_probs)} bytes of log-probs"
        )
