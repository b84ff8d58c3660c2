"""Turns as they are noted: a record is made of each when its batch is encoded.

Between two turns of a trajectory the driver does a hundred other things, and whatever it does once
a turn finds nothing of its own in the processor's caches. So a turn only says what its record is to
be made of, and the records of a batch are made in one go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rollout.engine.driver.generation import Generation
from rollout.scheduling.journal.entries import Entry, GivenAnswers, TurnEntry
from rollout.scheduling.journal.told_rows import ToldRow

if TYPE_CHECKING:
    from collections.abc import Iterable


class NotedTurn(msgspec.Struct, gc=False):
    """A turn that is over. What it refers to changes no more, but for what rows gain at their end.

    Attributes:
        row: Of its ids.
        told, count, length: How many pieces of the row the turns before have told, how many there
            were when it was sampled, and of how many ids.
        kept, segment, turn, seconds, answers: As in `TurnEntry`.
        seed: That it was sampled with.
        generation: What was sampled; it is over.
    """

    row: ToldRow
    told: int
    count: int
    length: int
    kept: int
    segment: str
    turn: int
    seed: int
    generation: Generation
    seconds: float
    answers: GivenAnswers | None = None

    def entry(self) -> TurnEntry:
        """Its record."""
        row, generation = self.row, self.generation
        ids, log_probs = generation.packed()
        entry = TurnEntry(
            row.key,
            row.start,
            self.segment,
            self.turn,
            (self.length, 0, self.seed),
            row.number,
            self.kept,
            row.prefix.pieces[self.told : self.count],
            ids,
            log_probs,
            generation.versions,
            generation.finish_reason,
            generation.cached_tokens,
            generation.resumes,
            self.seconds,
            None,
            None,
            self.answers,
        )
        if generation.top_count:
            entry.top = (generation.top_count, generation.top_ids, generation.top_log_probs)
        if generation.expert_shape is not None:
            shape, experts = generation.expert_shape, generation.routed_experts
            entry.experts = (*shape, generation.expert_room, experts)
        return entry


def entries_of(noted: Iterable[Entry | NotedTurn]) -> list[Entry]:
    """Records as they are encoded."""
    return [each.entry() if isinstance(each, NotedTurn) else each for each in noted]
