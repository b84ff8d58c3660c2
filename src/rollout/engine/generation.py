"""One generation as the driver sees it: the tokens that arrived, whatever became of the wait."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from rollout.engine.core import Chunk, FinishReason


@attrs.define
class TokenCounts:
    """What became of the tokens that arrived from a replica, each counted once.

    Attributes:
        taken: Appended to a `Generation`.
        late: Of a request that nobody waited for any more.
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


class ChunkFault(Exception):
    """A chunk contradicts what came before it: the engine is at fault and nothing was taken."""


class Generation:
    """Sampled tokens in the order in which they were sampled, packed.

    Filled in place while a request runs, so that a cancelled wait loses nothing.

    Attributes:
        ids: Sampled ids.
        log_probs: One for each id.
        versions: Runs ``[weight version, number of ids]``.
        finish_reason: None until the last chunk has come.
        cached_tokens: Prompt tokens that the engine did not need to prefill.
        replica: Name of the engine that answered.
        request_id: Of the request that was made last; empty before the first one.
        top_ids: Where asked for, int32: the k most likely ids at each position, likeliest first.
        top_log_probs: float32, one for each of `top_ids`.
        routed_experts: Where asked for, the raw bytes in which the engine says it.
    """

    __slots__ = (
        "cached_tokens",
        "finish_reason",
        "ids",
        "log_probs",
        "replica",
        "request_id",
        "routed_experts",
        "top_ids",
        "top_log_probs",
        "versions",
    )

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, before the request is made again from its start."""
        self.ids: array[int] = array("i")
        self.log_probs: array[float] = array("f")
        self.versions: list[list[int]] = []
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self.replica = ""
        self.request_id = ""
        self.top_ids = b""
        self.top_log_probs = b""
        self.routed_experts = b""

    def take(self, chunk: Chunk) -> bool:
        """Append a chunk's tokens; False for one that was taken before and changes nothing.

        Raises:
            ChunkFault: Tokens are missing before it, or its log-probs do not match its ids.
        """
        count = len(chunk.ids) // 4
        if len(chunk.ids) % 4 or len(chunk.log_probs) != len(chunk.ids):
            raise ChunkFault(
                f"{len(chunk.ids)} bytes of ids with {len(chunk.log_probs)} bytes of log-probs"
            )
        if len(chunk.top_ids) % 4 or len(chunk.top_log_probs) != len(chunk.top_ids):
            raise ChunkFault(
                f"{len(chunk.top_ids)} bytes of top ids with {len(chunk.top_log_probs)} bytes of "
                "log-probs"
            )
        if chunk.offset > len(self.ids):
            raise ChunkFault(f"tokens {len(self.ids)} to {chunk.offset} are missing")
        is_new = chunk.offset == len(self.ids)
        if count and is_new:
            self.ids.frombytes(chunk.ids)
            self.log_probs.frombytes(chunk.log_probs)
            self._add_version(chunk.weight_version, count)
        if is_new and chunk.top_ids:
            self.top_ids += chunk.top_ids
            self.top_log_probs += chunk.top_log_probs
        if is_new and chunk.routed_experts:
            self.routed_experts += chunk.routed_experts
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self.cached_tokens = chunk.cached_tokens
        return is_new

    def _add_version(self, version: int, count: int) -> None:
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1][1] += count
        else:
            self.versions.append([version, count])
