"""The trajectories of one prompt."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollout.chat.trajectory import Trajectory
from rollout.types import Prompt


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The members of one prompt that were wanted, in member order.

    Attributes:
        uid: The prompt's.
        prompt: What they started from.
        trajectories: One for each member, whatever its outcome.
        min_version, max_version: Of the weights that sampled any of their tokens; None where none
            was sampled.
    """

    uid: str
    prompt: Prompt
    trajectories: Sequence[Trajectory]
    min_version: int | None
    max_version: int | None

    @classmethod
    def of(cls, uid: str, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Group:
        """The group of these trajectories, its versions those of their tokens."""
        versions = {
            version
            for trajectory in trajectories
            for transcript in trajectory.transcripts
            for version in transcript.versions
        }
        return cls(
            uid=uid,
            prompt=prompt,
            trajectories=tuple(trajectories),  # members keep their places, whatever a user does
            min_version=min(versions, default=None),
            max_version=max(versions, default=None),
        )
