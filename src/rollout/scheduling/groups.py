"""Which groups a call wants, has, takes, refuses and leaves: decided here, without a task."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

import attrs

from rollout.config.group_policy import GroupPolicy
from rollout.errors import LimitExceeded
from rollout.scheduling.members import GROUP_S, MemberGroup
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.scheduling.members import Member

logger = logging.getLogger("rollout.scheduling")

#: Finished groups that wait for a slow consumer of a stream before no further prompt is pulled.
GROUP_BUFFER = 2
#: Each is logged once in a call.
TOO_OLD = (
    "stream_groups: groups that were carried from an earlier call have tokens that are older than "
    "max_staleness allows; their prompts begin again (groups/restarted counts them)"
)
IS_LATE = (
    "stream_groups: a group was taken %d versions after its first tokens, max_staleness = %d: that "
    "holds where the version rises by one after each %d groups, and not more often"
)
WAITS_FOR_VERSION = (
    "stream_groups waits for update_weights: %d groups were taken, and further ones would be older "
    "than max_staleness allows. Call update_weights, with a version that is one higher, after each "
    "groups_per_step groups"
)


@attrs.frozen(kw_only=True)
class Staleness:
    """How old the weights of a group's first token may be when its consumer takes it.

    Attributes:
        most: Versions.
        per_step: Groups that the consumer takes for each version.
        start: The version at the beginning.
    """

    most: int
    per_step: int
    start: int

    def count_allowed(self, version: int) -> int:
        """How many groups may have been taken, be ready, or be under way, in all.

        With one more, the last of them would be taken after more than `most` updates.
        """
        return self.count_taken_by(version) + self.most * self.per_step

    def count_taken_by(self, version: int) -> int:
        """Groups that the consumer takes until the end of that version."""
        return (version + 1 - self.start) * self.per_step

    def are_in_time(self, dues: Sequence[int], taken: int) -> bool:
        """Whether groups with these last versions can be taken by then, after `taken` others."""
        return all(
            taken + sum(other <= due for other in dues) <= self.count_taken_by(due)
            for due in {*dues}
        )


class Leftovers(NamedTuple):
    """What a call leaves: groups for the next call, unwanted members, and those to be carried."""

    groups: list[MemberGroup]
    surplus: list[Member]
    carried: list[Member]


class Groups:
    """The groups of one call.

    Each that it adopts is open until it is judged: accepted ones are ready for their consumer,
    others are over. What is open or ready at the end is left to the next call.

    Args:
        policy: What the call takes, and what becomes of the others.
        version: The weights' version now.

    Attributes:
        wanted: How many groups the call wants; None: as many as its consumer takes.
        members: How many members of each.
        staleness: How old what it takes may be; None: as old as it is.
        open: Those that are under way, in the order in which they were adopted.
        counts: Groups by what became of them.
        consumed: Groups that the consumer has taken.
        redelivered: Of these, those that a caller of an earlier process had.
    """

    def __init__(
        self,
        wanted: int | None,
        members: int,
        policy: GroupPolicy | None = None,
        *,
        staleness: Staleness | None = None,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        self.wanted, self.members, self.policy = wanted, members, policy or GroupPolicy()
        self.staleness, self._version = staleness, version
        self.open: dict[MemberGroup, None] = {}
        self.counts: Counter[str] = Counter()
        self.consumed = self.redelivered = 0
        self._ready: deque[MemberGroup] = deque()
        self._with_waiting: deque[MemberGroup] = deque()
        self._refused_in_a_row = 0
        #: Why the first of those that `max_refused` counts was refused; empty where none was.
        self._first_refusal = ""
        self._is_stopped = False

    # What it wants.

    @property
    def wants_group(self) -> bool:
        """Whether one more group is to be adopted."""
        if self._is_stopped or self.is_done:
            return False
        under_way = len(self.open) + len(self._ready)
        if self.wanted is not None:
            dropped = self.counts["dropped"]
            return self.consumed + under_way + dropped < self._most_at_once
        if self.staleness is not None:
            new, bound = self.consumed - self.redelivered, self._find_bound(self.staleness)
            return new + under_way < bound.count_allowed(self._version())
        return len(self._ready) < GROUP_BUFFER

    @property
    def _most_at_once(self) -> float:
        """How many groups may be under way or finished at once; dropped ones count too."""
        assert self.wanted is not None
        return math.floor(round(self.wanted * self.policy.oversample, 6))  # 100 × 1.1 is over 110

    @property
    def waits_for(self) -> str:
        """A message where nothing may start before the weights are newer; else empty."""
        is_idle = not (self.open or self._ready or self._is_stopped)
        if not is_idle or self.staleness is None or self.wants_group:
            return ""
        return WAITS_FOR_VERSION % self.consumed

    @property
    def has_all(self) -> bool:
        """Whether it has accepted as many as it wants."""
        return self.wanted is not None and self.counts["accepted"] >= self.wanted

    @property
    def is_done(self) -> bool:
        """Whether it has as many as it wants, or will never have more."""
        found, is_full = self.consumed + len(self._ready), False
        if self.wanted is not None:
            if found >= self.wanted:
                return True
            is_full = found + self.counts["dropped"] >= self._most_at_once
        return (self._is_stopped or is_full) and not self.open

    @property
    def has_refused_too_many(self) -> bool:
        """Whether `max_refused` is passed."""
        most = self.policy.max_refused
        return most is not None and self._count_refused() > most

    def _count_refused(self) -> int:
        """How many groups count for `max_refused`."""
        if self.wanted is None:
            return self._refused_in_a_row
        return self.counts["refused"] + self.counts["replaced"]

    def make_refused_error(self) -> LimitExceeded:
        """The error of a call that has refused too many groups."""
        which = "groups" if self.wanted is not None else "groups one after the other"
        over = " or met group_s" if self.counts["replaced"] + self.counts["dropped"] else ""
        return LimitExceeded(
            f"scheduling.groups.max_refused = {self.policy.max_refused}: {self._count_refused()} "
            f"{which} were refused{over} and {self.counts['accepted']} accepted; "
            f"the first: {self._first_refusal}",
            source="scheduling.groups.max_refused",
            reason="refused",
            outcome=Outcome.FAILED,
        )

    def stop(self) -> None:
        """Adopt nothing more; what runs comes to its end."""
        self._is_stopped = True

    # Groups and members that it has.

    def refresh(self, group: MemberGroup) -> MemberGroup:
        """Return the group for adoption; restarted, where it cannot be taken as it is.

        One that was complete for another call has cancelled the members not wanted there, and may
        have too few here; or its tokens are too old.
        """
        if group.is_complete and len(group.ended) < self.members:
            return group.restart()
        if not group.is_sampled:
            return group
        # After a resumption the weights may be older than those that it has tokens of.
        group.version = min(_get_version(group), self._version())
        if self.staleness is None or self._is_takeable(group, self.staleness):
            return group
        self.counts["restarted"] += 1
        if self.counts["restarted"] == 1:
            logger.warning(TOO_OLD)
        return group.restart()

    def adopt(self, group: MemberGroup) -> None:
        """Take on a group: its members are admitted soon."""
        if not group.is_sampled:
            group.version = self._version()
        self.open[group] = None
        if group.waiting:
            self._with_waiting.append(group)

    def next_member(self) -> Member | None:
        """The member that is to be admitted next; it stays in `waiting` until it begins."""
        while self._with_waiting:
            group = self._with_waiting[0]
            if group.waiting and not group.is_complete:
                return group.waiting[0]
            self._with_waiting.popleft()
        return None

    def begin(self, member: Member) -> None:
        """Note that a member has a slot."""
        member.group.waiting.remove(member)
        member.group.running.append(member)

    def record_end(self, member: Member, trajectory: Trajectory) -> None:
        """Note that a member has ended."""
        group = member.group
        group.forget(member)
        if group.refill_failed:
            self.counts["refilled"] += int(trajectory.metrics.get("attempts", 1)) - 1
        if group.is_complete:
            return
        group.ended[member] = trajectory
        # What an earlier process delivered is what its caller has, whatever ended its members.
        if trajectory.limit_source == GROUP_S and not group.was_delivered:
            group.is_overdue = True

    def can_judge(self, group: MemberGroup) -> bool:
        """Whether a group can be judged: its wanted members, or its own time, have ended."""
        return bool(group.choose(self.members)) or self.is_to_drop(group)

    def is_to_drop(self, group: MemberGroup) -> bool:
        """Whether a group is dropped or replaced because it met its own deadline."""
        return self.policy.on_group_deadline != "keep" and group.is_overdue

    def close_group(self, group: MemberGroup) -> list[Member]:
        """Note that a group is complete; return its unwanted members, which are to be cancelled."""
        group.is_complete = True
        surplus = [*group.running, *group.waiting]
        group.waiting.clear()
        return surplus

    def settle(self, group: MemberGroup, verdict: str, why: str = "") -> None:
        """Make an accepted group ready for the consumer, and end another one.

        Args:
            verdict: "accepted", "refused", "dropped", "replaced", or "delivered" member by member.
            why: For an error message, where it is not accepted.
        """
        del self.open[group]
        self.counts[verdict] += 1
        if verdict != "accepted":
            group.release()
            self._refused_in_a_row += 1
            self._first_refusal = self._first_refusal or why
            return
        self._refused_in_a_row = 0
        if self.wanted is None:  # a stream counts those that come one after the other
            self._first_refusal = ""
        self._ready.append(group)

    # What its consumer takes.

    def take(self) -> MemberGroup | None:
        """Take the next group for the consumer, the one that is due first; None: it has to wait.

        It waits where groups that are due earlier could not be taken in time after this one.
        """
        if not self._ready or self.consumed == self.wanted:
            return None
        bound, group = self.staleness, self._ready[0]
        if bound is not None:
            bound = self._find_bound(bound)
            dues = self._find_dues(bound)
            group = min(self._ready, key=dues.__getitem__)
            earlier = [due for due in dues.values() if due < dues[group]]
            if not bound.are_in_time(earlier, self.consumed - self.redelivered + 1):
                return None
        self._ready.remove(group)
        self.consumed += 1
        self.redelivered += group.was_delivered
        age = self._version() - _get_version(group)
        if bound is not None and age > bound.most:
            self.counts["late"] += 1
            if self.counts["late"] == 1:
                logger.warning(IS_LATE, age, bound.most, bound.per_step)
        return group

    def take_back(self, groups: Sequence[MemberGroup]) -> None:
        """Make groups ready again that the consumer did not get."""
        self.consumed -= len(groups)
        self.redelivered -= sum(group.was_delivered for group in groups)
        self._ready.extendleft(reversed(groups))

    def take_leftovers(self, *, may_carry: bool = True) -> Leftovers:
        """End the call: what it has and did not take is left, as `surplus` says.

        A group that is complete and has no reward, because that was interrupted, is like one that
        runs: where it is carried, the next call judges it. So it does with one that has its reward
        and was not judged, since `accept` raised.

        Args:
            may_carry: False while the runtime is being closed.
        """
        self.stop()
        carries = self.policy.surplus == "carry" and may_carry
        left = Leftovers([*self._ready], [], [])
        self.counts["carried"] += len(self._ready)
        for group in self.open:
            if carries or group.is_rewarded or not group.is_begun:
                self.counts["carried"] += group.is_begun
                left.groups.append(group)
                if not group.is_complete:  # else what runs of it was cancelled
                    left.carried.extend(group.running)
            else:
                self.counts["cancelled"] += 1
                left.groups.append(group.restart())
                left.surplus.extend(self.close_group(group))
        self.open.clear()
        self._ready.clear()
        left.groups.sort(key=lambda group: group.number)
        return left

    def count(self) -> dict[str, float]:
        """Count groups by what became of them; see `Selection`."""
        counts = self.counts
        names = ("refused", "cancelled", "carried", "restarted", "refilled")
        return {
            "groups/accepted": float(self.consumed),
            "groups/dropped": float(counts["dropped"] + counts["replaced"]),
            **{f"groups/{name}": float(counts[name]) for name in names},
        }

    # Staleness.

    def _is_takeable(self, group: MemberGroup, bound: Staleness) -> bool:
        """Whether a group, and all that are under way, can be taken before they are too old."""
        new, bound = self.consumed - self.redelivered, self._find_bound(bound)
        due, others = _get_version(group) + bound.most, self._find_dues(bound).values()
        return due >= self._version() and bound.are_in_time([due, *others], new)

    def _find_bound(self, bound: Staleness) -> Staleness:
        """The bound, from the version at which the consumer takes the first group new to it.

        It may take others, which the journal gives back, at one version, or at many.
        """
        if 0 < self.redelivered == self.consumed:
            self.staleness = bound = attrs.evolve(bound, start=self._version())
        return bound

    def _find_dues(self, bound: Staleness) -> dict[MemberGroup, int]:
        """The last version to take each group at; now, where an earlier process delivered it."""
        now, groups = self._version(), (*self.open, *self._ready)
        late = {each: max(_get_version(each) + bound.most, now) for each in groups}
        return {each: now if each.was_delivered else due for each, due in late.items()}


def _get_version(group: MemberGroup) -> int:
    assert group.version is not None  # it was adopted
    return group.version
