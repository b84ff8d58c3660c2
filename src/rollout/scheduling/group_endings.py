"""What has ended in a call of groups: counted, told, and held against the budget of failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.scheduling.endings import BadEndings
from rollout.scheduling.trajectory_events import tell_ended, tell_group_ended
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.config import SchedulingConfig
    from rollout.errors import LimitExceeded
    from rollout.limits import Deadline
    from rollout.observe.event_stream import EventStream
    from rollout.observe.tally import Tally
    from rollout.scheduling.ended_groups import Ended
    from rollout.scheduling.journal.group_log import GroupLog
    from rollout.scheduling.prompts import Member


class GroupEndings:
    """The members and groups of one call that have ended, whether or not they are taken.

    Args:
        deadline: Of the call.
        config: What becomes of trajectories that the deadline ended, and how many may fail.
        tally: Counts outcomes.
        events: Says of each.
    """

    def __init__(
        self, deadline: Deadline, config: SchedulingConfig, tally: Tally, events: EventStream
    ) -> None:
        self._deadline, self._config = deadline, config
        self._tally, self._events = tally, events
        self._bad = BadEndings()
        self._count = 0

    def add(self, member: Member, trajectory: Trajectory, log: GroupLog | None) -> None:
        """A member has ended.

        Args:
            log: Writes it, where it is wanted; one that holds what cannot be written fails there.
        """
        if self._config.on_deadline == "drop" and trajectory.limit_source == self._deadline.source:
            trajectory.trainable = False
        if log is not None:
            log.ended(member, trajectory)
        self._tally.outcomes[trajectory.outcome] += 1
        self._count += 1
        self._bad.add(trajectory)
        if self._events.is_on:
            tell_ended(self._events, member, trajectory)

    def excess(self, trajectory: Trajectory) -> LimitExceeded | None:
        """What the call ends with now that this one has; None: no more have failed than may."""
        if trajectory.outcome is Outcome.FAILED and self._bad.are_too_many(
            self._count, self._config
        ):
            return self._bad.error(self._count, self._config)
        return None

    def changed(self, were: Sequence[Outcome], now: Sequence[Ended]) -> LimitExceeded | None:
        """The reward of their group, or what it holds, gave members that had ended others.

        Args:
            were: Their outcomes before.
            now: These members.

        Returns:
            As `excess`, of all of them.
        """
        error = None
        for was, (_, _, trajectory) in zip(were, now, strict=True):
            if was is trajectory.outcome:
                continue
            self._tally.outcomes[was] -= 1
            self._tally.outcomes[trajectory.outcome] += 1
            self._bad.add(trajectory)
            error = error or self.excess(trajectory)
        return error

    def judged(self, group: Sequence[Ended], verdict: str) -> None:
        """A group is whole, and this is what becomes of it."""
        if self._events.is_on:
            tell_group_ended(self._events, group, verdict)

    def log(self) -> None:
        """See `BadEndings`."""
        self._bad.log()
