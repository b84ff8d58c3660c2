"""One generation as the driver sees it: the tokens that arrived, whatever became of the wait."""

from __future__ import annotations

import copy
import logging
from array import array
from itertools import accumulate
from typing import TYPE_CHECKING

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.engine.core import Chunk, FinishReason

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


class ChunkFault(Exception):
    """A chunk contradicts what came before it: the engine is at fault and nothing was taken."""


class Part(msgspec.Struct, eq=False, gc=False):
    """What one request gave to a generation; a recovered generation is made of several.

    Attributes:
        replica: The one that got the request.
        start: Where its tokens begin in the generation.
        count: Tokens taken from it.
        is_discarded: The generation restarted after it; its tokens are dropped.
    """

    request_id: str
    replica: str
    start: int
    count: int = 0
    is_discarded: bool = False


class Generation:
    """Sampled tokens in the order in which they were sampled, packed.

    Filled in place while requests run, so that a cancelled wait loses nothing.

    Attributes:
        ids: Sampled ids, int32.
        log_probs: One float32 for each id.
        finish_reason: None until the last chunk has come.
        cached_tokens: Prompt tokens that the engine did not need to prefill.
        parts: The requests made for it, in order; more than one where replicas were lost.
        resumes: How often it resumed elsewhere from the tokens it had.
        restarts: Why it restarted from its prompt, each time it did.
        versions: Runs ``[weight version, number of ids]``.
        bounded_by: Path of the length that bounds it, for the agent that asked for it.
        top_count: How many of the most likely ids are asked for with each token: k.
        top_ids: int32: the `top_count` most likely ids at each position, likeliest first.
        top_log_probs: float32, one for each of `top_ids`.
        expert_shape: (layers, top_k) of the experts that are asked for; None asks for none.
        expert_room: Tokens of the prompt whose experts are asked for: those that the caller does
            not know yet. Those of the generated tokens follow them.
        routed_experts: int16: the experts of the tokens asked for, as far as they are known.
        kept: How many of its tokens the caller keeps, once it has decided; None keeps all.
        held_s: Seconds that it waited because its trajectory was carried.
        is_seeded: Whether its seed was set and does not derive from the place of its turn.
        is_truncated: Whether it counts as one of a training row that top_k, top_p or min_p bend.
        on_tokens: Readers, each called with it at each chunk that brings tokens or the end; one
            that raises is logged and not called again. After a restart the tokens are fewer.
    """

    def __init__(
        self, on_tokens: Sequence[Callable[[Generation], object]] = (), *, is_seeded: bool = False
    ) -> None:
        self.ids = array("i")
        self.log_probs = array("f")
        self.versions: list[list[int]] = []
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self.parts: list[Part] = []
        self.resumes = 0
        self.restarts: list[str] = []
        self.bounded_by = ""
        self.top_count = 0
        self.expert_shape: tuple[int, int] | None = None
        self.expert_room = 0
        self.kept: int | None = None
        self.held_s = 0.0
        self.is_seeded, self.is_truncated = is_seeded, False
        self.on_tokens = tuple(on_tokens)
        self.top_ids: bytes | bytearray = bytearray()
        self.top_log_probs: bytes | bytearray = bytearray()
        self.routed_experts: bytes | bytearray = bytearray()
        self._packed: tuple[bytes, bytes] | None = None

    @property
    def count(self) -> int:
        """How many ids there are."""
        return len(self.ids)

    def packed(self) -> tuple[bytes, bytes]:
        """Ids, int32, and log-probs, float32; the same objects to all callers once it is over."""
        if self._packed is None or len(self._packed[0]) != 4 * len(self.ids):
            self._packed = (self.ids.tobytes(), self.log_probs.tobytes())
        return self._packed

    @property
    def last_part(self) -> Part | None:
        """The request that was made last; None before the first."""
        return self.parts[-1] if self.parts else None

    @property
    def replica(self) -> str:
        """Name of the replica that got the last request; empty before the first one."""
        return self.parts[-1].replica if self.parts else ""

    @property
    def request_id(self) -> str:
        """Of the request that was made last; empty before the first one."""
        return self.parts[-1].request_id if self.parts else ""

    @property
    def discarded_tokens(self) -> int:
        """Tokens that were taken and dropped: when it restarted, or past those that are kept."""
        dropped = 0 if self.kept is None else self.count - self.kept
        return dropped + sum(part.count for part in self.parts if part.is_discarded)

    def kept_part(self) -> Generation:
        """What the caller keeps of it: itself, or a copy of its beginning."""
        if self.kept is None:
            return self
        count, width = self.kept, 4 * self.kept * self.top_count
        ends = list(accumulate(length for _, length in self.versions))
        part = copy.copy(self)
        part.ids, part.log_probs, part._packed = self.ids[:count], self.log_probs[:count], None
        part.versions = [
            [version, min(length, count - end + length)]
            for (version, length), end in zip(self.versions, ends, strict=True)
            if end - length < count
        ]
        part.top_ids, part.top_log_probs = self.top_ids[:width], self.top_log_probs[:width]
        if self.expert_shape is not None:
            size = self._expert_bytes * (self.expert_room + count)
            part.routed_experts = self.routed_experts[:size]
        return part

    def top(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None:
        """The (T, k) most likely ids of its T tokens and their log-probs; None where k = 0."""
        if not self.top_count:
            return None
        shape = (self.count, self.top_count)
        ids = np.frombuffer(bytes(self.top_ids), np.int32).reshape(shape)
        return ids, np.frombuffer(bytes(self.top_log_probs), np.float32).reshape(shape)

    @property
    def known_experts(self) -> int:
        """Tokens whose experts have arrived."""
        if self.expert_shape is None:
            return 0
        return len(self.routed_experts) // self._expert_bytes

    def experts(self) -> npt.NDArray[np.int16] | None:
        """(N, layers, top_k) of the first N tokens asked for; None where nothing is asked."""
        if self.expert_shape is None:
            return None
        return np.frombuffer(bytes(self.routed_experts), np.int16).reshape(-1, *self.expert_shape)

    @property
    def _expert_bytes(self) -> int:
        """Of one token."""
        assert self.expert_shape is not None
        layers, top_k = self.expert_shape
        return 2 * layers * top_k

    # How it is filled.

    def begin(self, request_id: str, replica: str) -> Part:
        """What is taken from now on comes from this request, after the tokens there are."""
        self.finish_reason = None
        self.parts.append(Part(request_id, replica, self.count))
        return self.parts[-1]

    def restart(self, reason: str) -> None:
        """Drop the tokens, before the request is made again from its prompt."""
        for part in self.parts:
            part.is_discarded = True
        self.restarts.append(reason)
        self.ids, self.log_probs, self._packed, self.versions = array("i"), array("f"), None, []
        self.finish_reason, self.cached_tokens = None, 0
        self.top_ids, self.top_log_probs = bytearray(), bytearray()
        self.routed_experts = bytearray()

    def take(self, chunk: Chunk) -> int:
        """Append a chunk's tokens; how many, 0 where all were taken before.

        Raises:
            ChunkFault: Tokens are missing before it, or what comes with them does not match them;
                nothing was taken.
        """
        size = len(chunk.ids)
        if size % 4 or len(chunk.log_probs) != size:
            raise ChunkFault(f"{size} bytes of ids with {len(chunk.log_probs)} bytes of log-probs")
        self._check_top(chunk)
        self._check_experts(chunk)
        part = self.last_part or self.begin("", "")  # else filled by hand
        if chunk.offset > part.count:
            raise ChunkFault(f"tokens {part.count} to {chunk.offset} are missing")
        count = size // 4 if chunk.offset == part.count else 0
        if chunk.offset == part.count:
            self.top_ids += chunk.top_ids
            self.top_log_probs += chunk.top_log_probs
            self.routed_experts += chunk.routed_experts
        if count:
            self.ids.frombytes(chunk.ids)
            self.log_probs.frombytes(chunk.log_probs)
            part.count += count
            if self.versions and self.versions[-1][0] == chunk.weight_version:
                self.versions[-1][1] += count
            else:
                self.versions.append([chunk.weight_version, count])
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self.cached_tokens = chunk.cached_tokens
        if count or chunk.finish_reason is not None:
            self._call_readers()
        return count

    def recall(
        self, ids: bytes, log_probs: bytes, versions: list[list[int]], finish: FinishReason | None
    ) -> None:
        """Take the tokens of an answer that a journal remembers; it is over."""
        self.ids, self.log_probs = array("i", ids), array("f", log_probs)
        self._packed = (ids, log_probs)
        self.versions, self.finish_reason = versions, finish
        self._call_readers()

    def remove_reader(self, reader: Callable[[Generation], object]) -> None:
        """Call a reader no more; harmless where it is none."""
        self.on_tokens = tuple(each for each in self.on_tokens if each is not reader)

    def _call_readers(self) -> None:
        for reader in self.on_tokens:
            try:
                reader(self)
            except KeyboardInterrupt:
                raise
            except BaseException:  # other requests' tokens come by the same call
                logger.exception("a reader of tokens raised; it is not called again")
                self.remove_reader(reader)

    def _check_top(self, chunk: Chunk) -> None:
        size, count = len(chunk.top_ids), len(chunk.ids) // 4
        if size % 4 or len(chunk.top_log_probs) != size:
            raise ChunkFault(
                f"{size} bytes of top ids with {len(chunk.top_log_probs)} bytes of log-probs"
            )
        if self.top_count and size != 4 * count * self.top_count:
            raise ChunkFault(
                f"{size // 4} top ids with {count} tokens; expected sampling.top_log_probs = "
                f"{self.top_count} with each"
            )

    def _check_experts(self, chunk: Chunk) -> None:
        if not chunk.routed_experts or self.expert_shape is None:
            return
        size, each = len(chunk.routed_experts), self._expert_bytes
        if size % each:
            raise ChunkFault(f"{size} bytes of routed experts; expected {each} for each token")
        known, count = self.known_experts + size // each, self.count + len(chunk.ids) // 4
        if known > self.expert_room + count:
            raise ChunkFault(
                f"routed experts of {known} tokens; expected at most {self.expert_room + count}"
            )
