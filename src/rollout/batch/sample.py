"""What is said of one row beside its tensors."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.types import Outcome


class Sample(msgspec.Struct, kw_only=True):
    """One row of a batch beside its tensors; the fields are those of its `Trajectory`.

    `row` is the row's place in the tensors; `reward` is None where it is unknown.
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
