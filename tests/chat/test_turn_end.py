"""How a turn ends: the one table of it, and deadlines that pause together."""

from __future__ import annotations

import pytest

from rollout import Outcome
from rollout.agents.generating import find_end, find_natural_ending
from rollout.engine.core import FinishReason
from rollout.engine.pool.generation import Generation
from rollout.limits import Clock, Deadline

DEADLINE = Deadline(at=10.0, source="limits.generation_s", seconds=5.0)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("said", "now", "finish_reason", "cut_by", "outcome", "reason"),
    [
        ("stop", 20.0, "stop", None, Outcome.COMPLETED, ""),
        ("length", 20.0, "length", "lengths.turn", Outcome.LENGTH, "turn"),
        ("abort", 9.9, "abort", "abort", Outcome.COMPLETED, ""),
        ("abort", 10.0, "deadline", "limits.generation_s", Outcome.COMPLETED, ""),
        (None, 9.9, "abort", "abort", Outcome.COMPLETED, ""),
        (None, 10.0, "deadline", "limits.generation_s", Outcome.COMPLETED, ""),
        ("error", 10.0, "error", "error", Outcome.COMPLETED, ""),
    ],
)
async def test_turn_end_is_what_engine_deadline_and_length_say(
    said: FinishReason | None,
    now: float,
    finish_reason: str,
    cut_by: str | None,
    outcome: Outcome,
    reason: str,
) -> None:
    generation = Generation()
    generation.finish_reason, generation.bounded_by = said, "lengths.turn"
    assert find_end(generation, Clock(DEADLINE), now) == (finish_reason, cut_by)
    ending = find_natural_ending(finish_reason, cut_by)
    assert (ending.outcome, ending.reason) == (outcome, reason)


def test_natural_ending_without_a_turn_is_completed() -> None:
    assert find_natural_ending(None, None).outcome is Outcome.COMPLETED
