"""Which requests run, and which of their tokens the next step computes. No torch here.

A pure state machine that owns no thread: `submit` and `abort` change what is wanted, `admit` gives
slots to waiting requests, `plan` names the tokens of one step, `advance` takes what was sampled.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rollout.engine.core import Chunk, FinishReason, GenerationRequest
from rollout.engine.cores.transformers.slots import Ids, Keys, Slot, SlotChoice, SlotTable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollout.engine.cores.transformers.vision import VisionPrompt

#: Prompt tokens computed in one step beside the decoded ones: a long prompt delays the running
#: requests by some 0.2 s a step on one CPU core with a small model, and no more.
PREFILL_TOKENS = 256
#: Waiting requests looked at in one step, where the first ones wait for a prompt that they share.
MAX_LOOKED_AT = 64


class Sequence:
    """One request: its tokens so far, and how many of them have left in chunks.

    Attributes:
        ids: Buffer for prompt and response; the first `length` are known.
        limit: Length at which it ends: max_new_tokens or the context is used up.
        stop_ids: Ids that end it.
        seed: Of every draw; see `SamplingParams.seed`.
        vision: The media of its prompt; None where there are none.
        keys: As `ids`, with what stands for its medium at each placeholder.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        context_length: int,
        eos_ids: Iterable[int],
        seed: int,
        vision: VisionPrompt | None = None,
    ) -> None:
        prompt = np.frombuffer(request.prompt_ids, dtype="<i4")
        self.request = request
        self.sampling = request.sampling
        self.seed = seed
        self.prompt_length = self.length = len(prompt)
        self.limit = min(len(prompt) + self.sampling.max_new_tokens, context_length)
        self.ids: Ids = np.empty(self.limit, dtype=np.int32)
        self.ids[: len(prompt)] = prompt
        self.vision = vision
        self.keys: Keys = self.ids
        if vision is not None:
            self.keys = np.empty(self.limit, dtype=np.int64)
            self.keys[: len(prompt)] = vision.keys
        ends = () if self.sampling.ignore_eos else tuple(eos_ids)
        self.stop_ids = frozenset((*ends, *self.sampling.stop_token_ids))
        self.slot: Slot | None = None
        self.cached_tokens = 0
        self.log_probs = array("f")
        self._top_ids = self._top_log_probs = b""  # of the tokens that no chunk has carried yet
        self._sent = 0

    @property
    def unsent(self) -> int:
        """Sampled tokens that no chunk has carried yet."""
        return len(self.log_probs) - self._sent

    def append(
        self, token: int, log_prob: float, top_ids: bytes, top_log_probs: bytes
    ) -> FinishReason | None:
        """Add a sampled token; says whether that ends the request."""
        self.ids[self.length] = self.keys[self.length] = token
        self.length += 1
        self.log_probs.append(log_prob)
        self._top_ids += top_ids
        self._top_log_probs += top_log_probs
        if token in self.stop_ids:
            return "stop"
        return "length" if self.length >= self.limit else None

    def take_chunk(
        self,
        weight_version: int,
        reason: FinishReason | None = None,
        error: str = "",
        *,
        is_fatal: bool = False,
    ) -> Chunk:
        """The tokens that have not left yet, as a chunk."""
        start, self._sent = self._sent, len(self.log_probs)
        first = self.prompt_length + start
        top_ids, self._top_ids = self._top_ids, b""
        top_log_probs, self._top_log_probs = self._top_log_probs, b""
        return Chunk(
            request_id=self.request.request_id,
            offset=start,
            ids=self.ids[first : self.length].astype("<i4").tobytes(),
            log_probs=np.asarray(self.log_probs[start:], dtype="<f4").tobytes(),
            weight_version=weight_version,
            finish_reason=reason,
            error=error,
            is_fatal=is_fatal,
            cached_tokens=self.cached_tokens if reason is not None else 0,
            top_ids=top_ids,
            top_log_probs=top_log_probs,
        )


class Piece(NamedTuple):
    """Tokens ``[start, stop)`` of a running sequence, fed to the model in one step."""

    sequence: Sequence
    slot: Slot
    start: int
    stop: int

    @property
    def is_sampled(self) -> bool:
        """Whether its last token is the sequence's last, so that the next one can be drawn."""
        return self.stop == self.sequence.length


class Scheduler:
    """Waiting and running requests of one engine, and the slots that they share."""

    def __init__(self, *, max_running: int, stream_interval: int) -> None:
        self.table = SlotTable(max_running)
        self.generated_tokens = 0
        self.weight_version = 0
        self._stream_interval = stream_interval
        self._waiting: list[Sequence] = []
        self._running: dict[str, Sequence] = {}
        self._chunks: deque[Chunk] = deque()

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._running and not self._waiting

    @property
    def has_prompts(self) -> bool:
        """Whether the next step computes more of a prompt than its last token."""
        return (bool(self._waiting) and self.table.has_free) or any(
            sequence.slot is not None and sequence.length - sequence.slot.computed > 1
            for sequence in self._running.values()
        )

    def submit(self, sequence: Sequence) -> None:
        """Queue a request: after those of its priority, before those of a lower one."""
        insort(self._waiting, sequence, key=lambda queued: -queued.request.priority)

    def answer(self, request_id: str, reason: FinishReason, error: str = "") -> None:
        """End a request that was never queued."""
        self._chunks.append(
            Chunk(
                request_id=request_id,
                weight_version=self.weight_version,
                finish_reason=reason,
                error=error,
            )
        )

    def abort(self, request_id: str) -> None:
        """End a request with the tokens it has; unknown ids are ignored."""
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")
            return
        for index, waiting in enumerate(self._waiting):
            if waiting.request.request_id == request_id:
                self._send(self._waiting.pop(index), "abort")
                return

    def end_all(self, reason: FinishReason, error: str = "", *, is_fatal: bool = False) -> None:
        """End every request with the tokens it has."""
        for sequence in list(self._running.values()):
            self._finish(sequence, reason, error, is_fatal=is_fatal)
        for sequence in self._waiting:
            self._send(sequence, reason, error, is_fatal=is_fatal)
        self._waiting.clear()

    def change_weights(self, version: int) -> None:
        """What is sampled from now on has this version; running requests continue."""
        self.flush()  # a chunk has one version
        self.weight_version = version
        self.table.forget()

    def flush(self) -> None:
        """Send what running requests have sampled and not sent yet."""
        for sequence in self._running.values():
            if sequence.unsent:
                self._send(sequence)

    def admit(self) -> list[SlotChoice]:
        """Give free slots to waiting requests; the caller copies what the placements ask for."""
        placements = []
        index = 0
        while self.table.has_free and index < min(len(self._waiting), MAX_LOOKED_AT):
            placement = self._place(self._waiting[index])
            if placement is None:
                index += 1
            else:
                del self._waiting[index]
                placements.append(placement)
        return placements

    def plan(self) -> list[Piece]:
        """The tokens of the next step: single ones first, by slot, then parts of prompts."""
        singles: list[Piece] = []
        prompts: list[Piece] = []
        budget = PREFILL_TOKENS
        for sequence in self._running.values():
            slot = sequence.slot
            assert slot is not None  # it is running
            todo = sequence.length - slot.computed
            count = todo if todo == 1 else min(todo, budget)
            budget -= count if todo > 1 else 0
            piece = Piece(sequence, slot, slot.computed, slot.computed + count)
            if count:
                (singles if count == 1 else prompts).append(piece)
        return sorted(singles, key=lambda piece: piece.slot.index) + prompts

    def mark_computed(self, pieces: Iterable[Piece]) -> None:
        """The keys and values of `pieces` are in the cache."""
        for piece in pieces:
            piece.slot.computed = piece.stop

    def advance(
        self,
        sequence: Sequence,
        token: int,
        log_prob: float,
        top_ids: bytes = b"",
        top_log_probs: bytes = b"",
    ) -> None:
        """Add a sampled token; send a chunk where one is due, end the request where it is over."""
        reason = sequence.append(token, log_prob, top_ids, top_log_probs)
        self.generated_tokens += 1
        if reason is not None:
            self._finish(sequence, reason)
        elif sequence.unsent >= self._stream_interval:
            self._send(sequence)

    def fail(self, sequence: Sequence, error: str) -> None:
        """End a running request whose numbers are useless; its slot is not reused."""
        slot = sequence.slot
        self._finish(sequence, "error", error)
        if slot is not None:
            slot.computed = 0

    def take_chunks(self) -> list[Chunk]:
        """What has to be reported since the last call, in order."""
        chunks = list(self._chunks)
        self._chunks.clear()
        return chunks

    def computed_tokens(self) -> int:
        """Tokens of running requests in the KV cache."""
        return sum(slot.computed for slot in self.table.slots if slot.is_taken)

    def _place(self, sequence: Sequence) -> SlotChoice | None:
        prompt = sequence.keys[: sequence.prompt_length]
        session_id = sequence.request.session_id
        placement = self.table.place(prompt, session_id)
        if placement is None:
            return None
        self.table.take(
            placement.slot, sequence.keys, sequence.prompt_length, placement.reused, session_id
        )
        sequence.slot, sequence.cached_tokens = placement.slot, placement.reused
        self._running[sequence.request.request_id] = sequence
        return placement

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error: str = "", *, is_fatal: bool = False
    ) -> None:
        del self._running[sequence.request.request_id]
        if sequence.slot is not None:
            self.table.release(sequence.slot)
        self._send(sequence, reason, error, is_fatal=is_fatal)

    def _send(
        self,
        sequence: Sequence,
        reason: FinishReason | None = None,
        error: str = "",
        *,
        is_fatal: bool = False,
    ) -> None:
        self._chunks.append(
            sequence.take_chunk(self.weight_version, reason, error, is_fatal=is_fatal)
        )
