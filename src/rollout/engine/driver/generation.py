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

#: Of no ids: every generation begins with it, and has one of its own with its first ids.
_NO_VERSIONS: list[list[int]] = []


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
        replica: The one that was asked.
        start: Where its tokens begin in the generation.
        count: Tokens taken from it.
        is_discarded: The generation restarted after it; its tokens are dropped.
        before: The request before it.
    """

    request_id: str
    replica: str
    start: int
    count: int = 0
    is_discarded: bool = False
    before: Part | None = None


class Generation:
    """Sampled tokens in the order in which they were sampled, packed.

    Filled in place while requests run, so that a cancelled wait loses nothing.

    Attributes:
        finish_reason: None until the last chunk has come.
        cached_tokens: Prompt tokens that the engine did not need to prefill.
        last_part: The request that was made last; None before the first.
        resumes: How often it resumed elsewhere from the tokens it had.
        versions: Runs ``[weight version, number of ids]``.
        bounded_by: Path of the length that bounds it, for who asked for it.
        top_count: How many of the most likely ids are asked for with each token: k.
        top_ids: Where asked for, int32: the k most likely ids at each position, likeliest first.
        top_log_probs: float32, one for each of `top_ids`.
        expert_shape: (layers, top_k) of the experts that are asked for; None asks for none.
        expert_room: Tokens of the prompt whose experts are asked for: those that the caller does
            not know yet. Those of the generated tokens follow them.
        routed_experts: Of these tokens as far as they are known, int16.
        kept: How many of its tokens the caller keeps, once it has decided; None keeps all.
        held_s: Seconds that it waited because its trajectory was carried.
        is_seeded: Whether its seed was given and does not derive from the place of its turn.
        is_truncated: Whether it counts as one of a training row that top_k, top_p or min_p bend.
        on_tokens: Readers, each called with it at each chunk that brings tokens or the end; one
            that raises is logged and not called again. After a restart the tokens are fewer.
    """

    __slots__ = (
        "_ids",
        "_log_probs",
        "_packed",
        "_restarts",
        "bounded_by",
        "cached_tokens",
        "expert_room",
        "expert_shape",
        "finish_reason",
        "held_s",
        "is_seeded",
        "is_truncated",
        "kept",
        "last_part",
        "on_tokens",
        "resumes",
        "routed_experts",
        "top_count",
        "top_ids",
        "top_log_probs",
        "versions",
    )

    def __init__(
        self, on_tokens: Sequence[Callable[[Generation], object]] = (), *, is_seeded: bool = False
    ) -> None:
        self.last_part: Part | None = None
        self._restarts: tuple[str, ...] = ()
        self.on_tokens: tuple[Callable[[Generation], object], ...] = tuple(on_tokens)
        # Tokens that came at once stay as they came, packed. Arrays are made where more follow, or
        # somebody asks for them.
        self._ids: array[int] | None = None
        self._log_probs: array[float] | None = None
        self.versions: list[list[int]] = _NO_VERSIONS
        self._packed: tuple[bytes, bytes] | None = None
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self.resumes = 0
        self.bounded_by = ""
        self.top_count = 0
        self.top_ids = b""
        self.top_log_probs = b""
        self.expert_shape: tuple[int, int] | None = None
        self.expert_room = 0
        self.routed_experts = b""
        self.kept: int | None = None
        self.is_seeded, self.is_truncated = is_seeded, False
        self.held_s = 0.0

    @property
    def ids(self) -> array[int]:
        """Sampled ids."""
        if self._ids is None:
            if self._packed is None:
                return array("i")
            self._ids = array("i", self._packed[0])
        return self._ids

    @property
    def log_probs(self) -> array[float]:
        """One for each id."""
        if self._log_probs is None:
            if self._packed is None:
                return array("f")
            self._log_probs = array("f", self._packed[1])
        return self._log_probs

    @property
    def count(self) -> int:
        """How many ids there are."""
        if self._packed is not None:
            return len(self._packed[0]) // 4
        return 0 if self._ids is None else len(self._ids)

    def packed(self) -> tuple[bytes, bytes]:
        """Ids, int32, and log-probs, float32; the same objects to all who ask once it is over."""
        if self._packed is None:
            self._packed = (self.ids.tobytes(), self.log_probs.tobytes())
        return self._packed

    @property
    def restarts(self) -> list[str]:
        """Why it restarted, each time it did."""
        return list(self._restarts)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The requests made for it, in order; more than one where replicas were lost."""
        parts, part = [], self.last_part
        while part is not None:
            parts.append(part)
            part = part.before
        return tuple(reversed(parts))

    @property
    def replica(self) -> str:
        """Name of the engine that was asked last; empty before the first request."""
        return "" if self.last_part is None else self.last_part.replica

    @property
    def request_id(self) -> str:
        """Of the request that was made last; empty before the first one."""
        return "" if self.last_part is None else self.last_part.request_id

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
        versions = [
            [version, min(length, count - end + length)]
            for (version, length), end in zip(self.versions, ends, strict=True)
            if end - length < count
        ]
        part = copy.copy(self)
        part._ids, part._log_probs = self.ids[:count], self.log_probs[:count]
        part.versions, part._packed = versions, None
        part.top_ids, part.top_log_probs = self.top_ids[:width], self.top_log_probs[:width]
        if self.expert_shape is not None:
            size = self._bytes_of_experts * (self.expert_room + count)
            part.routed_experts = self.routed_experts[:size]
        return part

    def begin(self, request_id: str, replica: str) -> Part:
        """What is taken from now on comes from this request, after the tokens there are."""
        self.finish_reason = None
        part = self.last_part = Part(request_id, replica, self.count, before=self.last_part)
        return part

    def top(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None:
        """The (T, k) most likely ids of its T tokens and their log-probs; None where k = 0."""
        if not self.top_count:
            return None
        shape = (self.count, self.top_count)
        ids = np.frombuffer(self.top_ids, np.int32).reshape(shape)
        return ids, np.frombuffer(self.top_log_probs, np.float32).reshape(shape)

    @property
    def known_experts(self) -> int:
        """Tokens whose experts have arrived."""
        return len(self.routed_experts) // self._bytes_of_experts if self.expert_shape else 0

    def experts(self) -> npt.NDArray[np.int16] | None:
        """(N, layers, top_k) of the first N tokens asked for; None where nothing is asked."""
        if self.expert_shape is None:
            return None
        return np.frombuffer(self.routed_experts, np.int16).reshape(-1, *self.expert_shape)

    @property
    def _bytes_of_experts(self) -> int:
        """Of one token."""
        assert self.expert_shape is not None
        layers, top_k = self.expert_shape
        return 2 * layers * top_k

    def restart(self, reason: str) -> None:
        """Forget the tokens, before the request is made again from its start."""
        for part in self.parts:
            part.is_discarded = True
        self._restarts += (reason,)
        self._ids = self._log_probs = self._packed = None
        self.versions = _NO_VERSIONS
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
        has_more = chunk.top_ids or chunk.top_log_probs or chunk.routed_experts or self.top_count
        if has_more:
            self._check_top(chunk)
            self._check_experts(chunk)
        part = self.last_part or self.begin("", "")  # else filled by hand
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
            self._extend(ids, chunk.log_probs, chunk.weight_version, count)
            part.count = had + count
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self.cached_tokens = chunk.cached_tokens
        if self.on_tokens and (count or chunk.finish_reason is not None):
            self._tell()
        return count

    def recall(
        self, ids: bytes, log_probs: bytes, versions: list[list[int]], finish: FinishReason | None
    ) -> None:
        """It is over, and was made before: tokens, as they came then."""
        self._ids, self._log_probs, self._packed = None, None, (ids, log_probs)
        self.versions, self.finish_reason = versions, finish
        if self.on_tokens:
            self._tell()

    def _extend(self, ids: bytes, log_probs: bytes, version: int, count: int) -> None:
        if not self.versions:
            self._packed, self.versions = (ids, log_probs), [[version, count]]
            return
        self.ids.frombytes(ids)
        self.log_probs.frombytes(log_probs)
        self._packed = None
        if self.versions[-1][0] == version:
            self.versions[-1][1] += count
        else:
            self.versions.append([version, count])

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

    def _tell(self) -> None:
        for reader in self.on_tokens:
            try:
                reader(self)
            except KeyboardInterrupt:
                raise
            except BaseException:  # what it raises is not for those whose tokens come here as well
                logger.exception("a reader of tokens raised; it is not called again")
                self.leave_out(reader)

    def leave_out(self, reader: Callable[[Generation], object]) -> None:
        """Call a reader no more; harmless where it is none."""
        self.on_tokens = tuple(each for each in self.on_tokens if each is not reader)

    def _check_experts(self, chunk: Chunk) -> None:
        if not chunk.routed_experts or self.expert_shape is None:
            return
        size, each = len(chunk.routed_experts), self._bytes_of_experts
        if size % each:
            raise ChunkFault(f"{size} bytes of routed experts; expected {each} for each token")
        known, count = self.known_experts + size // each, self.count + len(chunk.ids) // 4
        if known > self.expert_room + count:
            raise ChunkFault(
                f"routed experts of {known} tokens; expected at most {self.expert_room + count}"
            )
