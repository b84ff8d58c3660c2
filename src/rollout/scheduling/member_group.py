"""A group: a prompt and its members, from when it was pulled until its call has judged it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from rollout.chat.group import Group
from rollout.limits import Deadline
from rollout.scheduling.prompts import Ended, Member
from rollout.scheduling.recorded import RecordedGroup
from rollout.scheduling.trajectory import AgentRun
from rollout.types import Outcome, Prompt

#: Limit of a group, as `Trajectory.limit_source` names it.
GROUP_S = "scheduling.groups.group_s"


@attrs.define(eq=False)
class GroupMember(Member):
    """A member of a group.

    Attributes:
        group: That one.
    """

    group: MemberGroup = attrs.field(kw_only=True)

    @property
    def tokens(self) -> int | None:
        """Sampled so far, while its agent runs; else None."""
        return self.scope.tokens if isinstance(self.scope, AgentRun) else None


@attrs.define(eq=False)
class MemberGroup:
    """A prompt, and its members: each is in one of `waiting`, `running` and `ended`.

    Attributes:
        number: Its number among the prompts of its call, or among all that the runtime pulled.
        source: Where it was pulled from; None where it was given in a list of a batch.
        waiting: Not admitted, or carried.
        running: Admitted and not ended.
        ended: In the order in which they did.
        version: The oldest of the weights that sampled for it, or may have; None before a call
            adopted it, where the journal has no tokens of it either.
        call: The call that has it; None while it is a leftover.
        refills: How often each member was restarted.
        is_rewarded: Whether `group_reward` was called.
        is_settled: It is complete: no further member of it is wanted.
        is_unjudged: It is complete, and `accept` raised.
        result: What its consumer gets, once it is judged.
        before: What the journal has of it from an earlier process.
        delivery: Number of the journal's record that this call gives it to its caller; 0: none.
        known: Of its members that have ended, as many as had before its call adopted it.
    """

    number: int
    prompt: Prompt
    source: Any = None
    waiting: list[GroupMember] = attrs.field(factory=list)
    running: dict[GroupMember, None] = attrs.field(factory=dict)
    ended: list[Ended] = attrs.field(factory=list)
    version: int | None = None
    call: Any = None
    refills: dict[int, int] = attrs.field(factory=dict)
    is_rewarded: bool = False
    is_settled: bool = False
    is_unjudged: bool = False
    result: Group | None = None
    before: RecordedGroup | None = None
    delivery: int = 0
    known: int = 0
    _deadline: Deadline | None = None
    _paused_s: Callable[[], float] = float
    _paused_before: float = 0.0
    #: How many of `ended`, the last ones, did so while no call had it.
    _ended_alone: int = 0

    @property
    def uid(self) -> str:
        """The prompt's."""
        return self.prompt.uid or ""

    @property
    def is_begun(self) -> bool:
        """Whether any member of it has been admitted."""
        return bool(self.running or self.ended) or self.is_carried

    @property
    def is_sampled(self) -> bool:
        """Whether it may have tokens, the oldest of which are of the weights of its version."""
        return self.is_begun or (self.before is not None and self.before.version is not None)

    @property
    def is_named(self) -> bool:
        """Whether its name stands, since its members or the journal have it."""
        return self.is_begun or bool(self.waiting) or self.before is not None

    @property
    def was_given(self) -> bool:
        """Whether an earlier process gave it to its caller."""
        return self.before is not None and self.before.delivered_in is not None

    @property
    def is_carried(self) -> bool:
        """Whether members of it wait to continue."""
        return any(member.is_held for member in self.waiting)

    def limit(self, seconds: float | None, paused_s: Callable[[], float]) -> None:
        """Give it so many seconds from now on, if it has no deadline yet; None: no limit.

        Args:
            paused_s: For how long the runtime has paused all work so far, which does not count.
        """
        if self._deadline is None and seconds is not None:
            self._deadline = Deadline.after(seconds, GROUP_S)
            self._paused_s, self._paused_before = paused_s, paused_s()

    @property
    def deadline(self) -> Deadline | None:
        """Its own deadline as things stand, while a call has it."""
        own = self._deadline
        paused_s = 0.0 if own is None else self._paused_s() - self._paused_before
        return own.later(paused_s) if own is not None and paused_s else own

    def end_alone(self, ended: Ended) -> None:
        """Note that a member has ended while no call had the group."""
        self.forget(ended.member)
        self.ended.append(ended)
        self._ended_alone += 1

    def join(self, call: Any) -> list[Ended]:
        """Give the group to this call; it has no deadline until `limit`.

        Returns:
            Members that ended while no call had it; they are not in `ended` any more.
        """
        self.call, self._deadline = call, None
        self.delivery, self.known = 0, len(self.ended) - self._ended_alone
        alone, self._ended_alone = self.ended[self.known :], 0
        del self.ended[self.known :]
        for member in (*self.waiting, *(each.member for each in (*self.ended, *alone))):
            member.batch = call.batch  # what becomes of it does so in this call
        return alone

    def choose(self, count: int) -> list[Ended]:
        """Choose the members that its consumer gets, in member order; none while it is incomplete.

        Those that ended first, of which a trainer may learn; where these are too few, others that
        did not fail, and then failed ones.
        """
        if len(self.ended) < count:
            return []
        taken = [e for e in self.ended if e.member.log is not None and e.member.log.is_taken]
        if len(taken) >= count:  # an earlier process gave these out
            return sorted(taken, key=_number)[:count]
        sound = sum(each.trajectory.trainable for each in self.ended)
        if sound < count and (self.waiting or self.running):
            return []
        return sorted(sorted(self.ended, key=_unfitness)[:count], key=_number)

    @property
    def is_overdue(self) -> bool:
        """Whether its own deadline has ended a member, in the call that has it.

        One that its caller had is what that took, whatever ended its members then.
        """
        if self.was_given:
            return False
        ended = self.ended[self.known :]
        return any(each.trajectory.limit_source == GROUP_S for each in ended)

    def forget(self, member: Member) -> None:
        """Remove a member that has ended from those that run or wait."""
        self.running.pop(member, None)  # type: ignore[call-overload]
        if member in self.waiting:
            self.waiting.remove(member)

    def reopen(self, members: int) -> MemberGroup:
        """Return it for a call that wants so many members; as it was pulled, where it has too few.

        One that was complete for another call has cancelled the members not wanted there.
        """
        if self.is_settled and len(self.ended) < members:
            return self.restart()
        self.is_settled = self.is_unjudged = False
        return self

    def restart(self) -> MemberGroup:
        """Make a group of the same prompt, without members, as it was when it was pulled."""
        return MemberGroup(self.number, self.prompt, self.source)


def _number(ended: Ended) -> int:
    return ended.member.identity.member


def _unfitness(ended: Ended) -> int:
    """Sorts what is wanted less after what is wanted more."""
    if ended.trajectory.trainable:
        return 0
    return 2 if ended.trajectory.outcome is Outcome.FAILED else 1
