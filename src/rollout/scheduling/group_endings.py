"""What has ended in a call of groups: counted, told, and held against the budget of failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.scheduling.endings import BadEndings
from rollout.scheduling.trajectory_events import tell_ended, tell_group_ended
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.config import SchedulingConfig
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
        fail: Has the call end with an error.
    """

    def __init__(
        self,
        deadline: Deadline,
        config: SchedulingConfig,
        tally: Tally,
        events: EventStream,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._deadline, self._config = deadline, config
        self._tally, self._events = tally, events
        self._fail = fail
        self._bad = BadEndings(tally)
        self._count = 0

    def add(
        self,
        member: Member,
        trajectory: Trajectory,
        log: GroupLog | None,
        *,
        is_surplus: bool,
        is_again: bool,
    ) -> None:
        """A member has ended.

        Args:
            log: Writes it, where it counts; one that holds what cannot be written fails there.
            is_surplus: Whether its group was decided about before.
            is_again: Whether it is started again: only its last end counts.
        """
        if self._config.on_deadline == "drop" and trajectory.limit_source == self._deadline.source:
            trajectory.trainable = False
        if log is not None:
            log.ended(member, trajectory)
        self._tally.outcomes[trajectory.outcome] += 1
        self._count += not is_again
        self._bad.add(trajectory, is_free=is_surplus or is_again)
        if self._events.is_on:
            tell_ended(self._events, member, trajectory)
        if log is not None:
            self._check(trajectory)

    def take_over(self, trajectory: Trajectory, *, is_counted: bool) -> None:
        """One had ended while no call had its group: it was counted and told then.

        Args:
            is_counted: Whether it is not started again.
        """
        self._count += is_counted
        self._bad.add(trajectory, is_free=not is_counted)
        if is_counted:
            self._check(trajectory)

    def _check(self, trajectory: Trajectory) -> None:
        """Have the call end where more have failed than may, now that this one has ended."""
        if trajectory.outcome is Outcome.FAILED and self._bad.are_too_many(
            self._count, self._config
        ):
            self._fail(self._bad.error(self._count, self._config))

    def changed(self, were: Sequence[Outcome], now: Sequence[Ended]) -> None:
        """The reward of their group, or what it holds, gave members that had ended others.

        Args:
            were: Their outcomes before.
            now: These members.
        """
        for was, (_, _, trajectory) in zip(were, now, strict=True):
            if was is trajectory.outcome:
                continue
            self._tally.outcomes[was] -= 1
            self._tally.outcomes[trajectory.outcome] += 1
            self._bad.add(trajectory)
            self._check(trajectory)

    def judged(self, group: Sequence[Ended], verdict: str) -> None:
        """A group is whole, and this is what becomes of it."""
        if self._events.is_on:
            tell_group_ended(self._events, group, verdict)

    def log(self) -> None:
        """See `BadEndings`."""
        self._bad.log()
