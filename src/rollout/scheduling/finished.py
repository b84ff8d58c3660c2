"""Trajectories without a reward, and those of members whose agent never ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.agents.identity import Ending
from rollout.chat.trajectory import Trajectory
from rollout.chat.transcript import Transcript
from rollout.types import Cause, Outcome

if TYPE_CHECKING:
    from rollout.limits import Deadline
    from rollout.scheduling.member_group import Member


def exclude(trajectory: Trajectory) -> None:
    """Mark a trajectory as not trainable, without a reward."""
    trajectory.trainable, trajectory.reward = False, None
    for segment in trajectory.segments:
        segment.reward = segment.token_rewards = None


def end_without_reward(
    trajectory: Trajectory, outcome: Outcome, reason: str, source: str | None, cause: Cause | None
) -> None:
    """Give an outcome to a trajectory whose reward is unknown: it keeps its tokens, untrained."""
    trajectory.outcome, trajectory.reason = outcome, reason
    trajectory.limit_source, trajectory.cause = source, cause
    exclude(trajectory)


def explain_cut(member: Member, deadline: Deadline) -> Ending:
    """Say how a member was ended from outside: it was cancelled, or else met this deadline."""
    if member.cancel_reason is not None:
        return Ending(outcome=Outcome.CANCELLED, reason=member.cancel_reason)
    error = deadline.error()
    return Ending(outcome=error.outcome, reason=error.reason, limit_source=error.source)


def make_unstarted(member: Member, ending: Ending, cause: Cause | None = None) -> Trajectory:
    """Make the trajectory of a member whose agent never ran: an outcome and no tokens."""
    return Trajectory(
        uid=member.identity.uid,
        group=member.identity.group,
        member=member.identity.member,
        transcript=Transcript(),
        outcome=ending.outcome,
        reason=ending.reason,
        limit_source=ending.limit_source,
        cause=cause,
        trainable=False,
        extra=dict(member.prompt.extra),
        prompt=member.prompt,
    )
