"""Which groups a call wants, has, takes, refuses and leaves: decided here, without a task."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from typing import TYPE_CHECKING

import attrs

from rollout.errors import LimitExceeded
from rollout.scheduling.pulled_group import GroupMember, PulledGroup
from rollout.scheduling.rewards.score import REWARD_REASON
from rollout.scheduling.staleness import IS_LATE, WAITS_FOR_VERSION, StalenessBound
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.scheduling.ended_groups import Ended

#: Said once in a call.
TOO_OLD = (
    "stream_groups: groups that were carried from an earlier call have tokens that are older than "
    "max_staleness allows; their prompts begin again (groups/restarted counts them)"
)

logger = logging.getLogger("rollout.scheduling")

#: Groups that wait for a slow consumer of a stream before no further prompt is pulled.
GROUP_BUFFER = 2


@attrs.frozen(kw_only=True)
class Wanted:
    """What a call wants, taken from its policy.

    Attributes:
        groups: How many; None: as many as its consumer takes.
        members: Of each group.
        oversample, on_group_deadline, surplus, max_refused: See `GroupPolicy`.
        refills: How often a failed member is restarted.
    """

    groups: int | None
    members: int
    oversample: float = 1.0
    max_refused: int | None = None
    surplus: str = "cancel"
    on_group_deadline: str = "keep"
    refills: int = 0

    @property
    def at_once(self) -> float:
        """Groups that may be under way or finished, those that were left out aside."""
        if self.groups is None:
            return math.inf
        return math.floor(round(self.groups * self.oversample, 6))  # 100 × 1.1 is more than 110


@attrs.define(eq=False)
class Leaving:
    """What a call leaves.

    Attributes:
        kept: Groups for the next call, in the order in which they were pulled.
        surplus: Members that are not wanted any more.
        carried: Members that are to continue in the next call.
    """

    kept: list[PulledGroup] = attrs.field(factory=list)
    surplus: list[GroupMember] = attrs.field(factory=list)
    carried: list[GroupMember] = attrs.field(factory=list)


class GroupBook:
    """The groups of one call.

    Each group that it adopts is open until it is judged: accepted ones wait for their consumer,
    refused and dropped ones are over. What is open or waits at the end is left to the next call.

    Args:
        wanted: What the call wants.
        bound: How old what it takes may be; None: as old as it is.
        version: The weights' version now.

    Attributes:
        counts: Groups by what became of them.
        consumed: Groups that the consumer has taken.
    """

    def __init__(
        self,
        wanted: Wanted,
        bound: StalenessBound | None = None,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.consumed = 0
        self.wanted = wanted
        self._bound = bound
        self._has_said_late = False
        self._version = version
        self._open: dict[PulledGroup, None] = {}
        self._ready: deque[PulledGroup] = deque()
        self._with_waiting: deque[PulledGroup] = deque()
        self._refused_in_a_row = 0
        #: Why the first of those that `max_refused` counts was refused; empty where none was.
        self._first_refusal = ""
        self._is_stopped = self._has_all_prompts = self._is_left = False

    @property
    def open_groups(self) -> tuple[PulledGroup, ...]:
        """Those that are under way."""
        return tuple(self._open)

    @property
    def wants_group(self) -> bool:
        """Whether one more is to be adopted."""
        if self._is_stopped or self._has_all_prompts or self.is_complete:
            return False
        under_way = len(self._open) + len(self._ready)
        if self.wanted.groups is not None:
            return under_way + self.counts["dropped"] < self.wanted.at_once
        if self._bound is not None:
            return self.consumed + under_way < self._bound.room(self._version())
        return len(self._ready) < GROUP_BUFFER

    @property
    def waits_for_version(self) -> bool:
        """Whether nothing is under way, and nothing may start before the weights are newer."""
        is_idle = not (self._open or self._ready or self._is_stopped)
        return is_idle and self._bound is not None and not self.wants_group

    @property
    def waiting(self) -> str:
        """What it waits for where `waits_for_version`."""
        return WAITS_FOR_VERSION % self.consumed if self.waits_for_version else ""

    @property
    def has_all(self) -> bool:
        """Whether it has accepted as many as it wants."""
        groups = self.wanted.groups
        return groups is not None and self.counts["accepted"] >= groups

    @property
    def is_complete(self) -> bool:
        """Whether it has as many as it wants, or will never have more."""
        groups = self.wanted.groups
        if groups is not None and len(self._ready) >= groups:
            return True
        if self._is_stopped or self._has_all_prompts:
            return not self._open
        return groups is not None and not self._open and self._lacks_none()

    def _lacks_none(self) -> bool:
        return len(self._ready) + self.counts["dropped"] >= self.wanted.at_once

    def refused_error(self) -> LimitExceeded:
        """What a call ends with that has refused too many."""
        which = "groups" if self.wanted.groups is not None else "groups one after the other"
        over = " or met group_s" if self.counts["replaced"] + self.counts["dropped"] else ""
        return LimitExceeded(
            f"scheduling.groups.max_refused = {self.wanted.max_refused}: {self._refused} {which} "
            f"were refused{over} and {self.counts['accepted']} accepted; "
            f"the first: {self._first_refusal}",
            source="scheduling.groups.max_refused",
            reason="refused",
            outcome=Outcome.FAILED,
        )

    @property
    def has_refused_too_many(self) -> bool:
        """Whether `max_refused` is passed."""
        most = self.wanted.max_refused
        return most is not None and self._refused > most

    @property
    def _refused(self) -> int:
        """Groups that others have taken the place of, as `max_refused` counts them."""
        if self.wanted.groups is None:
            return self._refused_in_a_row
        return self.counts["refused"] + self.counts["replaced"]

    def stop(self) -> None:
        """Start nothing more, and restart nothing; what runs comes to its end."""
        self._is_stopped = True

    def stop_pulling(self) -> None:
        """There are no more prompts; what is open comes to its end."""
        self._has_all_prompts = True

    def adopt(self, group: PulledGroup) -> bool:
        """Take a group on; whether it is whole already."""
        if not group.is_sampled:
            group.version = self._version()
        self._open[group] = None
        if group.waiting:
            self._with_waiting.append(group)
        return self.is_whole(group)

    def fitting(self, group: PulledGroup) -> PulledGroup:
        """A group that is to be adopted, or, started over where it is too old to be taken."""
        if not group.is_sampled:
            return group
        # After a resumption the weights may be older than those that it has tokens of.
        group.version = min(_version_of(group), self._version())
        if self._bound is None or self._can_be_taken(group, self._bound):
            return group
        self.counts["restarted"] += 1
        if self.counts["restarted"] == 1:
            logger.warning(TOO_OLD)
        return group.fresh()

    def _can_be_taken(self, group: PulledGroup, bound: StalenessBound) -> bool:
        """Whether it, and all that are under way, can be taken before they are too old."""
        now, due = self._version(), bound.due(_version_of(group))
        if due < now:
            return False
        dues = [due, *self._dues(bound)]
        left = {each: bound.taken_by(each) - self.consumed for each in dues if each >= due}
        return all(sum(other <= each for other in dues) <= left[each] for each in left)

    def _dues(self, bound: StalenessBound) -> list[int]:
        """When each group that is under way or waits is to be taken at the latest."""
        return [self._due(group, bound) for group in (*self._open, *self._ready)]

    def _due(self, group: PulledGroup, bound: StalenessBound) -> int:
        """When it is: what its caller had before a resumption comes before all others."""
        now = self._version()
        return now if group.was_given else max(bound.due(_version_of(group)), now)

    def next_member(self) -> GroupMember | None:
        """The member that is to be admitted next; it is not in `waiting` any more."""
        while self._with_waiting:
            group = self._with_waiting[0]
            if group.waiting and not group.is_settled:
                group.at_door = group.waiting.popleft()
                return group.at_door
            self._with_waiting.popleft()
        return None

    def put_back(self, member: GroupMember) -> None:
        """A member that `next_member` gave was not admitted."""
        member.group.at_door = None
        if not member.group.is_settled:
            member.group.waiting.appendleft(member)
            self._with_waiting.appendleft(member.group)

    def begun(self, member: GroupMember) -> None:
        """It is admitted."""
        member.group.at_door = None
        member.group.running[member] = None

    def ended(self, group: PulledGroup, ended: Ended) -> bool:
        """A member has ended; whether it counts, and is not to be restarted."""
        group.forget(ended.member)
        if group.is_settled:
            return True
        number = ended.member.identity.member
        trajectory = ended.trajectory
        # What only its reward failed for has its tokens, and `rewards.retries` has asked again.
        failed = trajectory.outcome is Outcome.FAILED and trajectory.reason != REWARD_REASON
        if failed and not self._is_stopped and group.refills[number] < self.wanted.refills:
            group.refills[number] += 1
            return False
        group.ended.append(ended)
        return True

    def restart(self, member: GroupMember) -> None:
        """Have a member in the place of one that failed admitted soon."""
        member.group.waiting.append(member)
        self._with_waiting.appendleft(member.group)

    def is_whole(self, group: PulledGroup) -> bool:
        """Whether it can be judged: its wanted members have ended, or its own time is over."""
        return bool(group.wanted(self.wanted.members)) or self.is_to_drop(group)

    def is_to_drop(self, group: PulledGroup) -> bool:
        """Whether its own deadline has decided about it."""
        return self.wanted.on_group_deadline != "keep" and group.is_overdue

    def settle(self, group: PulledGroup) -> list[GroupMember]:
        """It is whole: the members that are not wanted, some of which run."""
        group.is_settled = True
        door = [] if group.at_door is None else [group.at_door]
        surplus = [*group.running, *group.waiting, *door]
        group.waiting.clear()
        return surplus

    def drop(self, group: PulledGroup) -> None:
        """Its own deadline ended it."""
        del self._open[group]
        self.counts["replaced" if self.wanted.on_group_deadline == "refill" else "dropped"] += 1
        self._refused_in_a_row += 1
        self._first_refusal = self._first_refusal or f"{group.uid!r} met group_s"

    def judged(self, group: PulledGroup, *, is_accepted: bool, why: str = "") -> None:
        """It was whole, and is taken or refused.

        Args:
            why: It is refused, for an error message.
        """
        del self._open[group]
        if not is_accepted:
            self._first_refusal = self._first_refusal or why
        elif self.wanted.groups is None:  # a stream counts those that come one after the other
            self._first_refusal = ""
        self.counts["accepted" if is_accepted else "refused"] += 1
        self._refused_in_a_row = 0 if is_accepted else self._refused_in_a_row + 1
        if is_accepted:
            self._ready.append(group)

    def metrics(self) -> dict[str, float]:
        """What became of its groups; see `Selection`."""
        counts = self.counts
        return {
            "groups/accepted": float(self.consumed),
            "groups/refused": float(counts["refused"]),
            "groups/cancelled": float(counts["cancelled"]),
            "groups/carried": float(counts["carried"]),
            "groups/dropped": float(counts["dropped"] + counts["replaced"]),
            "groups/restarted": float(counts["restarted"]),
        }

    def take(self) -> PulledGroup | None:
        """The next group for the consumer; None where it has to wait."""
        for group in self._ready:
            if self._may_be_next(group):
                self._ready.remove(group)
                self.consumed += 1
                self._look_at_age(group)
                return group
        return None

    def take_back(self, groups: Sequence[PulledGroup]) -> bool:
        """Its consumer does not get what it took; whether it may take it again: not once left."""
        self.consumed -= len(groups)
        if not self._is_left:
            self._ready.extendleft(reversed(groups))
        return not self._is_left

    def _look_at_age(self, group: PulledGroup) -> None:
        """Say so where the version has risen faster than the bound knows."""
        bound, age = self._bound, self._version() - _version_of(group)
        if bound is not None and age > bound.most and not self._has_said_late:
            self._has_said_late = True
            logger.warning(IS_LATE, age, bound.most, bound.per_step)

    def _may_be_next(self, group: PulledGroup) -> bool:
        """Whether those that are due earlier can still be taken in time after it."""
        bound = self._bound
        if bound is None:
            return True
        due, others = self._due(group, bound), self._dues(bound)
        for each in sorted({other for other in others if other < due}):
            count = sum(other <= each for other in others)
            if count > bound.taken_by(each) - self.consumed - 1:
                return False
        return True

    def take_all(self) -> list[PulledGroup]:
        """As many as are wanted, in the order in which they were pulled."""
        groups = self.wanted.groups
        taken = [self._ready.popleft() for _ in range(min(len(self._ready), groups or 0))]
        self.consumed += len(taken)
        return sorted(taken, key=lambda group: group.row)

    def leave(self, *, is_over: bool = False) -> Leaving:
        """End the call: what it has and did not take is kept, as `surplus` says.

        A group that is whole and not judged, because its reward was interrupted, is like one that
        runs: where it is carried, the next call judges it. One that `accept` raised for is kept.

        Args:
            is_over: Nothing is carried, because the runtime is being closed.
        """
        self.stop()
        self._is_left = True
        carries = self.wanted.surplus == "carry" and not is_over
        leaving = Leaving(kept=list(self._ready))
        self.counts["carried"] += len(self._ready)
        for group in self._open:
            if carries or group.is_unjudged or not group.is_begun:
                self.counts["carried"] += group.is_begun
                leaving.kept.append(group)
                if not group.is_settled:  # else what runs of it was cancelled
                    leaving.carried += group.running
            else:
                self.counts["cancelled"] += 1
                leaving.kept.append(group.fresh())
                leaving.surplus += self.settle(group)
        self._open.clear()
        self._ready.clear()
        leaving.kept.sort(key=lambda group: group.number)
        return leaving


def _version_of(group: PulledGroup) -> int:
    assert group.version is not None  # it was adopted
    return group.version
