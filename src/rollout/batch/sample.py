"""What is said of one row beside its tensors."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.chat.trajectory import MAIN, Parent
from rollout.types import Outcome


class Sample(msgspec.Struct, kw_only=True):
    """One row of a batch beside its tensors; the fields are those of its `Trajectory`.

    Attributes:
        row: Its place in the tensors.
        segment: Which segment of the trajectory it is: an index.
        parent: The segment that it departs from, and the position; None for the first.
        purpose: As `Segment.purpose`.
        session_id, seeds: As those of the `Segment`.
        trainable: Whether a trainer may learn from this row, apart from the mask.
        reward: Of this row: the segment's own, or else its trajectory's; None where it is unknown.
    """

    uid: str
    group: int
    member: int
    row: int
    num_turns: int
    outcome: Outcome
    reason: str
    limit_source: str | None
    trainable: bool
    reward: float | None
    turn_scores: list[float]
    tool_rewards: list[float]
    metrics: dict[str, float]
    extra: dict[str, Any]
    segment: int = 0
    parent: Parent | None = None
    purpose: str = MAIN
    session_id: str = ""
    seeds: list[int] = []
