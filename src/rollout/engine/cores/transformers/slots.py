"""Which tokens each KV slot holds, and which slot a new prompt should take.

A slot keeps the tokens of its last request after that has ended, so that the session's next turn,
or another prompt with the same beginning, need not compute them again. No torch here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
#: What tells tokens apart: their ids, and of placeholders of media what stands there.
Keys = npt.NDArray[np.int32] | npt.NDArray[np.int64]

#: Fewer common tokens than this are cheaper to compute again than to copy or to wait for.
MIN_SHARED = 32
#: Ids compared at first: most pairs of prompts already differ there.
FIRST_LOOK = 16


class Slot:
    """One row of the KV cache.

    Attributes:
        index: Row of the KV tensors.
        keys: Tokens of the request that took the slot last; the cache holds the first `computed`.
        computed: How many tokens have their keys and values in the cache.
        coming: How many will, once the running request's prompt is through; 0 for an idle slot.
        session_id: Session of that request.
        is_taken: Whether a request is running in it.
        last_used: Larger is later.
        is_stale: What it holds was computed with other weights, and serves no other request.
    """

    __slots__ = (
        "coming",
        "computed",
        "index",
        "is_stale",
        "is_taken",
        "keys",
        "last_used",
        "session_id",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.keys: Keys = np.empty(0, dtype=np.int32)
        self.computed = 0
        self.coming = 0
        self.session_id = ""
        self.is_taken = False
        self.last_used = 0
        self.is_stale = False

    def common(self, prompt: Keys) -> int:
        """How many tokens at the beginning of `prompt` the cache holds."""
        return common_prefix(prompt, self.keys[: self.computed])


class SlotChoice(NamedTuple):
    """Where a prompt goes: `slot` keeps `kept` tokens, and `source` gives those up to `reused`."""

    slot: Slot
    kept: int
    reused: int
    source: Slot | None


def common_prefix(a: Keys, b: Keys) -> int:
    """Length of the longest common beginning of two sequences."""
    n = min(len(a), len(b))
    if n > FIRST_LOOK and not np.array_equal(a[:FIRST_LOOK], b[:FIRST_LOOK]):
        n = FIRST_LOOK
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


class SlotTable:
    """The slots of a KV cache and the rules by which they change hands."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(index) for index in range(count)]
        self._clock = 0

    @property
    def has_free(self) -> bool:
        """Whether a request can be placed now."""
        return any(not slot.is_taken for slot in self.slots)

    def place(self, prompt: Keys, session_id: str) -> SlotChoice | None:
        """Where `prompt` should go; None where waiting a moment saves computing it.

        At least the prompt's last token is always left to compute, because its logits are needed.
        Call only while a slot is free; nothing changes before `take`.
        """
        prompt = prompt[:-1]
        candidates = [
            (slot, slot.common(prompt))
            for slot in self.slots
            if slot.computed and not slot.is_stale
        ]
        source, best = max(candidates, key=lambda pair: pair[1], default=(None, 0))
        if self._coming(prompt) - best >= MIN_SHARED:
            return None
        slot, kept = self._destination(session_id, candidates, best)
        if source is None or slot is source or best - kept < MIN_SHARED:
            return SlotChoice(slot, kept, kept, None)
        return SlotChoice(slot, kept, best, source)

    def take(
        self, slot: Slot, keys: Keys, prompt_length: int, reused: int, session_id: str
    ) -> None:
        """Give `slot` to a request; `keys` is its buffer, of which `reused` tokens are computed."""
        slot.keys, slot.computed, slot.coming = keys, reused, prompt_length
        slot.session_id, slot.is_taken, slot.is_stale = session_id, True, False

    def release(self, slot: Slot) -> None:
        """The request in `slot` has ended; its tokens stay until another request needs the slot."""
        self._clock += 1
        slot.is_taken, slot.coming, slot.last_used = False, 0, self._clock
        if slot.is_stale:
            slot.computed = 0

    def forget(self) -> None:
        """Nothing computed so far serves a request that comes later."""
        for slot in self.slots:
            slot.is_stale = slot.is_taken
            if not slot.is_taken:
                slot.computed = 0

    def _coming(self, prompt: Keys) -> int:
        """The longest beginning of `prompt` that a request is about to compute."""
        return max(
            (
                common_prefix(prompt, slot.keys[: slot.coming])
                for slot in self.slots
                if slot.computed < slot.coming and not slot.is_stale
            ),
            default=0,
        )

    def _destination(
        self, session_id: str, candidates: list[tuple[Slot, int]], best: int
    ) -> tuple[Slot, int]:
        """A free slot: the session's own, else one that loses nothing, else the oldest."""
        free = [(slot, common) for slot, common in candidates if not slot.is_taken]
        for slot, common in free:
            if session_id and slot.session_id == session_id:
                return slot, common
        for slot, common in free:
            if common == slot.computed and best - common < MIN_SHARED:
                return slot, common
        victim = min(
            (slot for slot in self.slots if not slot.is_taken),
            key=lambda slot: (slot.computed > 0, slot.last_used),
        )
        return victim, next((common for slot, common in free if slot is victim), 0)
