"""A prompt that was pulled from its source, and the members that run for it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import attrs

from rollout.chat.group import Group
from rollout.limits import Deadline
from rollout.scheduling.ended_groups import Ended
from rollout.scheduling.journal.entries import Key
from rollout.scheduling.journal.pulled_before import PulledBefore
from rollout.scheduling.prompts import Member
from rollout.scheduling.trajectory import AgentRun
from rollout.types import Outcome, Prompt

#: Limit of a group, as `Trajectory.limit_source` names it.
GROUP_S = "scheduling.groups.group_s"


@attrs.define(eq=False)
class GroupMember(Member):
    """A member of a group that was pulled.

    Attributes:
        group: That one.
    """

    group: PulledGroup = attrs.field(kw_only=True)

    @property
    def tokens(self) -> int | None:
        """Sampled so far, while its agent runs; else None."""
        return self.scope.tokens if isinstance(self.scope, AgentRun) else None


@attrs.define(eq=False)
class PulledGroup:
    """A prompt, and what has become of its members so far.

    A member is in one of `waiting`, `running` and `ended`, or `at_door`.

    Attributes:
        number: Its place among all prompts that the runtime pulled.
        source: Where it was pulled from.
        waiting: Not admitted, or carried.
        at_door: The one that waits for a place.
        running: Admitted and not ended.
        ended: In the order in which they did.
        version: The oldest of the weights that sampled for it, or may have; None before a call
            took it on, where the journal has no tokens of it either.
        call: The call that has it; None while it is kept for the next one.
        refills: How often each member was restarted.
        is_rewarded: Whether the reward of groups was asked for.
        is_settled: What it is to become is decided: nothing of it is wanted any more.
        is_unjudged: It is whole, and `accept` did not say whether it is taken.
        made: What its consumer gets, once it is whole.
        pulled: Its uid as its source gave it; see `name_at`.
        before: What the journal has of it from an earlier process.
        key: Of one of its members in the journal; None while it is not there.
        delivery: Number of the journal's record that this call gives it to its caller; 0: none.
        known: Of its members that have ended, as many as had before its call took it on.
    """

    number: int
    prompt: Prompt
    source: Any = None
    waiting: deque[GroupMember] = attrs.field(factory=deque)
    at_door: GroupMember | None = None
    running: dict[GroupMember, None] = attrs.field(factory=dict)
    ended: list[Ended] = attrs.field(factory=list)
    version: int | None = None
    _deadline: Deadline | None = None
    _paused_s: Callable[[], float] = float
    _paused_before: float = 0.0
    call: Any = None
    refills: Counter[int] = attrs.field(factory=Counter)
    is_rewarded: bool = False
    is_settled: bool = False
    is_unjudged: bool = False
    made: Group | None = None
    pulled: str = ""
    before: PulledBefore | None = None
    key: Key | None = None
    delivery: int = 0
    known: int = 0
    #: Members that ended while no call had it.
    _alone: list[Ended] = attrs.field(factory=list)

    @property
    def uid(self) -> str:
        """The prompt's."""
        return self.prompt.uid or ""

    @property
    def row(self) -> int:
        """What sorts it among the rows of a call."""
        given = None if self.before is None else self.before.row
        return self.number if given is None else given

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
        return self.before is not None and self.before.step is not None

    @property
    def is_carried(self) -> bool:
        """Whether members of it wait to continue."""
        return any(member.is_held for member in self.waiting)

    def limit(self, seconds: float | None, paused_s: Callable[[], float]) -> None:
        """It has so long from now on, if it has no deadline yet; None: as long as it takes.

        Args:
            paused_s: For how long the runtime has let all work wait so far, which is not counted.
        """
        if self._deadline is None and seconds is not None:
            self._deadline = Deadline.after(seconds, GROUP_S)
            self._paused_s, self._paused_before = paused_s, paused_s()

    def ended_alone(self, ended: Ended) -> None:
        """A member has ended while no call had it."""
        self.forget(ended.member)
        self.ended.append(ended)
        self._alone.append(ended)

    def taken_on_by(self, call: Any) -> list[Ended]:
        """This call has it; it has no deadline until that gives it one.

        Returns:
            Members that ended while no call had it; they are not in `ended` any more.
        """
        self.call, self._deadline = call, None
        alone, self._alone = self._alone, []
        self.ended = [each for each in self.ended if not any(each is other for other in alone)]
        self.delivery, self.known = 0, len(self.ended)
        for member in (*self.waiting, *(each.member for each in (*self.ended, *alone))):
            member.batch = call.batch  # what becomes of it does so in this call
        return alone

    @property
    def deadline(self) -> Deadline | None:
        """Its own as things stand, while a call has it."""
        own = self._deadline
        paused_s = 0.0 if own is None else self._paused_s() - self._paused_before
        return own.later(paused_s) if own is not None and paused_s else own

    def wanted(self, members: int) -> list[Ended]:
        """The members that its consumer gets, in member order; empty while it is not whole.

        Those that ended first, of which a trainer may learn; where these are too few, others that
        did not fail, and then failed ones.
        """
        taken = [e for e in self.ended if e.member.log is not None and e.member.log.is_taken]
        if len(taken) >= members:  # an earlier process gave these out
            return sorted(taken, key=_number)[:members]
        sound = sum(each.trajectory.trainable for each in self.ended)
        if sound < members and (self.waiting or self.running or self.at_door):
            return []
        return sorted(sorted(self.ended, key=_unfitness)[:members], key=_number)

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
        """It has ended; a carried one may wait for its readmission."""
        self.running.pop(member, None)  # type: ignore[call-overload]
        if self.at_door is member:
            self.at_door = None
        if member.is_held and member in self.waiting:
            self.waiting.remove(member)  # type: ignore[arg-type]

    def for_call(self, members: int) -> PulledGroup:
        """It, for a call that wants so many members; as it was pulled, where it has too few.

        One that was whole for another call has let the members go that were not wanted there.
        """
        if self.is_settled and len(self.ended) < members:
            return self.fresh()
        self.is_settled = self.is_unjudged = False
        return self

    def fresh(self) -> PulledGroup:
        """The same prompt, as it was when it was pulled."""
        key = self.key if self.before is None else self.before.key
        return PulledGroup(self.number, self.prompt, self.source, pulled=self.pulled, key=key)


def _number(ended: Ended) -> int:
    return ended.member.identity.member


def _unfitness(ended: Ended) -> int:
    """Sorts what is wanted less after what is wanted more."""
    if ended.trajectory.trainable:
        return 0
    return 2 if ended.trajectory.outcome is Outcome.FAILED else 1
