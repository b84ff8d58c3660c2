"""Which requests run, and which of their tokens the next step computes. No torch here.

A pure state machine that owns no thread: `submit` and `abort` change what is wanted, `admit` gives
slots to waiting requests, `plan` names the tokens of one step, `advance` takes what was sampled.

A slot keeps the tokens of its last request after that has ended, so that the next turn of the same
session, or another prompt with the same beginning, need not compute them again.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rollout.engine.core import Chunk, FinishReason, GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Ids = npt.NDArray[np.int32]
NO_IDS: Ids = np.empty(0, dtype=np.int32)

#: Prompt tokens computed in one step beside the decoded ones, padding included: a long prompt
#: delays the running requests by some 0.2 s a step on one CPU core with a small model, and no more.
PREFILL_TOKENS = 256
#: Fewer common tokens than this are cheaper to compute again than to copy or to wait for.
MIN_SHARED = 32
#: Waiting requests looked at in one step, where the first ones wait for a prompt that they share.
MAX_LOOKED_AT = 64


class TransformersOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is loaded and served; most are fields of `rollout.config.TransformersEngine`.

    Attributes:
        model: A local directory, a hub name or ``embedded:smollm2-135m-instruct``.
        device: A torch device, or "auto" for a GPU if there is one.
        gpu: Which GPU of its machine, counted round, where `device` names none ("cuda", "auto").
    """

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    device: str = "cpu"
    gpu: int = 0
    threads: int = 1
    max_running: int = 32
    max_queued: int = 1024
    context_length: int | None = None


class Sequence:
    """One request: its tokens so far.

    Attributes:
        ids: Buffer for prompt and response; the first `length` are known.
        limit: Length at which it ends: max_new_tokens or the context is used up.
        stop_ids: Ids that end it.
        seed: Of every draw; see `SamplingParams.seed`.
        slot: Where it runs; None while it waits.
    """

    def __init__(
        self, request: GenerationRequest, *, context_length: int, eos_ids: Iterable[int], seed: int
    ) -> None:
        prompt = np.frombuffer(request.prompt_ids, dtype="<i4")
        self.request = request
        self.sampling = request.sampling
        self.seed = seed
        self.prompt_length = self.length = len(prompt)
        self.limit = min(len(prompt) + self.sampling.max_new_tokens, context_length)
        self.ids: Ids = np.empty(self.limit, dtype=np.int32)
        self.ids[: len(prompt)] = prompt
        ends = () if self.sampling.ignore_eos else tuple(eos_ids)
        self.stop_ids = frozenset((*ends, *self.sampling.stop_token_ids))
        self.slot: Slot | None = None
        self.cached_tokens = 0


class Slot:
    """One row of the KV cache.

    Attributes:
        index: Row of the KV tensors.
        ids: Tokens of the request that took the slot last, of which the first `computed` serve
            others too; empty where they were computed with other weights.
        computed: How many tokens have their keys and values in the cache.
        session_id: Session of that request.
        sequence: The request that runs in it.
        last_used: Larger is later.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.ids = NO_IDS
        self.computed = 0
        self.session_id = ""
        self.sequence: Sequence | None = None
        self.last_used = 0


class Piece(NamedTuple):
    """Tokens ``[start, stop)`` of a running sequence, fed to the model in one batch."""

    sequence: Sequence
    slot: Slot
    start: int
    stop: int

    @property
    def is_sampled(self) -> bool:
        """Whether its last token is the sequence's last, so that the next one can be drawn."""
        return self.stop == self.sequence.length


#: ``copy(source, target, start, stop)`` copies positions ``[start, stop)`` of a slot to another.
CopyPositions = Callable[[int, int, int, int], None]


class Draw(NamedTuple):
    """A sampled id and its log-prob; nan where the logits were not finite.

    Attributes:
        top_ids: The likeliest ids, as many as were asked for, likeliest first; int32, packed.
        top_log_probs: Their log-probs; float32, packed.
    """

    id: int
    log_prob: float
    top_ids: bytes = b""
    top_log_probs: bytes = b""


class Scheduler:
    """Waiting and running requests of one engine, and the slots that they share.

    Attributes:
        slots: Of the KV cache.
        generated_tokens: Sampled since the start.
        weight_version: Stamped on what is sampled from now on.
        chunks: What has to be reported, in order; the caller empties it.
    """

    def __init__(self, *, max_running: int) -> None:
        self.slots = [Slot(index) for index in range(max_running)]
        self.generated_tokens = 0
        self.weight_version = 0
        self.chunks: list[Chunk] = []
        self._waiting: list[Sequence] = []
        self._clock = 0

    @property
    def running(self) -> list[Sequence]:
        """Requests that have a slot, in the order of their slots."""
        return [slot.sequence for slot in self.slots if slot.sequence is not None]

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._waiting and not self.running

    @property
    def computed_tokens(self) -> int:
        """Tokens of running requests in the KV cache."""
        return sum(slot.computed for slot in self.slots if slot.sequence is not None)

    def submit(self, sequence: Sequence) -> None:
        """Queue a request: after those of its priority, before those of a lower one."""
        insort(self._waiting, sequence, key=lambda queued: -queued.request.priority)

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        for sequence in (*self.running, *self._waiting):
            if sequence.request.request_id == request_id:
                self.finish(sequence, "abort")
                return

    def abort_all(self) -> None:
        """End every request."""
        for sequence in (*self.running, *self._waiting):
            self.finish(sequence, "abort")

    def forget(self) -> None:
        """What was computed so far serves no request that comes later."""
        for slot in self.slots:
            slot.ids = NO_IDS

    def admit(self, copy: CopyPositions) -> None:
        """Give free slots to waiting requests, with copies of what other slots hold of prompts.

        A request waits while a running one is computing a beginning that both prompts share.
        """
        for sequence in self._waiting[:MAX_LOOKED_AT]:
            if all(slot.sequence is not None for slot in self.slots):
                break
            prompt = sequence.ids[: sequence.prompt_length - 1]  # the last one's logits are needed
            shared = {slot: count_common(prompt, slot.ids[: slot.computed]) for slot in self.slots}
            coming = [
                count_common(prompt, slot.ids[: slot.sequence.prompt_length])
                for slot in self.slots
                if slot.sequence is not None and slot.computed < slot.sequence.prompt_length
            ]
            if max(coming, default=0) - max(shared.values()) < MIN_SHARED:
                self._waiting.remove(sequence)
                self._start(sequence, shared, copy)

    def plan(self) -> list[list[Piece]]:
        """The batches of the next step: parts of prompts, and the last tokens of other requests."""
        prompts: list[Piece] = []
        decoded: list[Piece] = []
        widest = 0
        for sequence in self.running:
            slot = sequence.slot
            assert slot is not None  # it is running
            todo = min(sequence.length - slot.computed, PREFILL_TOKENS)
            piece = Piece(sequence, slot, slot.computed, slot.computed + todo)
            if todo == 1:
                decoded.append(piece)
            elif (len(prompts) + 1) * max(widest, todo) <= PREFILL_TOKENS:
                prompts.append(piece)
                widest = max(widest, todo)
        return [batch for batch in (prompts, decoded) if batch]

    def advance(self, sequence: Sequence, draw: Draw) -> None:
        """Add and report a sampled token; end the request where it is over."""
        sequence.ids[sequence.length] = draw.id
        sequence.length += 1
        self.generated_tokens += 1
        reason: FinishReason | None = "length" if sequence.length >= sequence.limit else None
        if draw.id in sequence.stop_ids:
            reason = "stop"
        self._report(
            sequence,
            reason,
            ids=array("i", [draw.id]).tobytes(),
            log_probs=array("f", [draw.log_prob]).tobytes(),
            top_ids=draw.top_ids,
            top_log_probs=draw.top_log_probs,
        )
        if reason is not None:
            self._leave(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """End a request with the tokens that it has."""
        self._report(sequence, reason, error=error)
        self._leave(sequence)

    def _start(self, sequence: Sequence, shared: Mapping[Slot, int], copy: CopyPositions) -> None:
        """Give a free slot to a request: its session's own, else the one used longest ago.

        `shared` says how much of the prompt each slot holds.
        """
        session_id = sequence.request.session_id
        free = [slot for slot in self.slots if slot.sequence is None]
        own = [slot for slot in free if session_id and slot.session_id == session_id]
        slot = own[0] if own else min(free, key=lambda each: (len(each.ids) > 0, each.last_used))
        source = max(shared, key=lambda each: shared[each])
        slot.ids, slot.computed, slot.session_id = sequence.ids, shared[slot], session_id
        if shared[source] - shared[slot] >= MIN_SHARED:
            copy(source.index, slot.index, shared[slot], shared[source])
            slot.computed = shared[source]
        slot.sequence, sequence.slot = sequence, slot
        sequence.cached_tokens = slot.computed

    def _leave(self, sequence: Sequence) -> None:
        """Free the slot of a request that has ended; its tokens stay until another needs it."""
        slot = sequence.slot
        if slot is None:
            self._waiting.remove(sequence)
            return
        self._clock += 1
        slot.sequence, slot.last_used = None, self._clock

    def _report(
        self, sequence: Sequence, reason: FinishReason | None, *, ids: bytes = b"", **content: Any
    ) -> None:
        chunk = Chunk(
            request_id=sequence.request.request_id,
            offset=sequence.length - sequence.prompt_length - len(ids) // 4,
            ids=ids,
            weight_version=self.weight_version,
            finish_reason=reason,
            cached_tokens=0 if reason is None else sequence.cached_tokens,
            **content,
        )
        self.chunks.append(chunk)


def count_common(a: Ids, b: Ids) -> int:
    """Length of the longest common beginning of two sequences."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count
