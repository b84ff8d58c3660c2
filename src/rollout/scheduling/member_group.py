"""Members and their groups: a prompt, from when it was pulled until its call has judged it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import anyio
import attrs

from rollout.agents.identity import Identity, named
from rollout.chat.group import Group
from rollout.limits import Clock, Deadline
from rollout.scheduling.recorded import MemberLog, RecordedGroup
from rollout.types import Outcome, Prompt

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory

#: Limit of a group, as `Trajectory.limit_source` names it.
GROUP_S = "scheduling.groups.group_s"


class Running(Protocol):
    """A member's agent, or the call of its reward, while it runs."""

    @property
    def tokens(self) -> int | None:
        """Sampled so far by an agent; None of a reward."""

    def cancel(self) -> None:
        """Have it end soon."""


@attrs.define(eq=False, weakref_slot=False)
class Member:
    """One trajectory to be run, from admission to its outcome.

    Attributes:
        prompt: As its caller gave it, with or without a uid; see `named_prompt`.
        group: That which it belongs to.
        row: Its index in its call.
        running: Its agent or the call of its reward, while there is one.
        slot_wait: What ends its wait for a slot.
        cancel_reason: Set once it has been cancelled.
        deadline_met: The deadline of its call or group, where that ends it.
        clock: Its limits, once it has a slot.
        is_carried: It is carried to the next call: its task waits, without a slot.
        is_finished: Whether it has its outcome.
        log: Its part of the journal; None where there is none.
        concluding_since: When its agent ended, or its trajectory began to wait for others of its
            group, on the loop's clock; None before.
        batch: Number of the call that admitted it, for events.
        began: When its first attempt did, for events; None where it has not.
    """

    prompt: Prompt
    identity: Identity
    group: MemberGroup
    row: int = 0
    running: Running | None = None
    slot_wait: anyio.CancelScope | None = None
    cancel_reason: str | None = None
    deadline_met: Deadline | None = None
    clock: Clock | None = None
    is_carried: bool = False
    is_finished: bool = False
    log: MemberLog | None = None
    concluding_since: float | None = None
    batch: int = 0
    began: float | None = None

    @property
    def named_prompt(self) -> Prompt:
        """Its prompt, with its uid; the same object each time."""
        self.prompt = prompt = named(self.prompt, self.identity.uid)
        return prompt

    @property
    def tokens(self) -> int | None:
        """Sampled so far, while its agent runs; else None."""
        return None if self.running is None else self.running.tokens

    @property
    def is_ending(self) -> bool:
        """Whether it was cancelled, or its call's or group's time is over."""
        return self.cancel_reason is not None or self.deadline_met is not None

    def replace(self) -> Member:
        """Make a member in its place, as it failed."""
        return Member(self.prompt, self.identity, self.group, log=self.log)

    def carry(self) -> None:
        """Carry it: it makes no further request, and all of its limits stand still."""
        assert self.clock is not None
        self.is_carried = True
        self.clock.carry()

    def continue_carried(self, deadline: Deadline) -> None:
        """Let a carried one continue, with this deadline."""
        assert self.clock is not None
        self.is_carried = False
        self.clock.continue_carried(deadline)

    def matches(self, uid: str | None, member: int | None) -> bool:
        """Whether it is this member of this prompt; None stands for all."""
        return uid in (None, self.identity.uid) and member in (None, self.identity.member)

    def can_cancel(self, uid: str | None, member: int | None) -> bool:
        """Whether a cancellation of this prompt and member, None for all, is still to reach it."""
        return not self.is_finished and self.cancel_reason is None and self.matches(uid, member)

    def cancel(self, reason: str | None = None, *, deadline: Deadline | None = None) -> None:
        """Cancel its agent, its reward, or its wait for a slot, and whatever of them comes later.

        Args:
            reason: Why; the first one stays.
            deadline: That which is over, where it is for this.
        """
        self.cancel_reason = self.cancel_reason or reason
        self.deadline_met = self.deadline_met or deadline
        for code in (self.running, self.slot_wait):
            if code is not None:
                code.cancel()

    def set_running(self, running: Running) -> None:
        """Note what is cancelled with the member from now on; at once where that is ending."""
        self.running = running
        if self.is_ending:
            running.cancel()


def cancel_members(
    members: Iterable[Member], reason: str | None = None, *, deadline: Deadline | None = None
) -> None:
    """Cancel members; see `Member.cancel`."""
    for member in members:
        member.cancel(reason, deadline=deadline)


class Ended(NamedTuple):
    """A member that has ended, its row, and its trajectory."""

    row: int
    member: Member
    trajectory: Trajectory


class Stage(IntEnum):
    """How far a group is, in this order."""

    #: Members of it run, wait, or are still to be admitted.
    OPEN = 0
    #: The wanted members have ended; no other is wanted.
    COMPLETE = 1
    #: `group_reward` was called, where there is one.
    REWARDED = 2
    #: `accept` raised.
    UNJUDGED = 3


@attrs.define(eq=False)
class MemberGroup:
    """A prompt, and its members: each is in one of `waiting`, `running` and `ended`.

    Attributes:
        number: Its number among the prompts of its call, or among all that the runtime pulled.
        source: Where it was pulled from; None where it was given in a list of a batch.
        stage: How far it is.
        waiting: Not admitted, or carried.
        running: Admitted and not ended.
        ended: In the order in which they did.
        version: The oldest of the weights that sampled for it, or may have; None before a call
            adopted it, where the journal has no tokens of it either.
        call: The call that has it; None while it is a leftover.
        is_shared: Whether several members begin with its prompt.
        refills: How often each member was restarted.
        result: What its consumer gets, once it is judged.
        before: What the journal has of it from an earlier process.
        delivery: Number of the journal's record that this call gives it to its caller; 0: none.
        known: Of its members that have ended, as many as had before its call adopted it.
    """

    number: int
    prompt: Prompt
    source: Any = None
    stage: Stage = Stage.OPEN
    waiting: list[Member] = attrs.field(factory=list)
    running: dict[Member, None] = attrs.field(factory=dict)
    ended: list[Ended] = attrs.field(factory=list)
    version: int | None = None
    call: Any = None
    is_shared: bool = False
    refills: dict[int, int] = attrs.field(factory=dict)
    result: Group | None = None
    before: RecordedGroup | None = None
    delivery: int = 0
    known: int = 0
    _deadline: Deadline | None = None
    _paused_s: Callable[[], float] = float
    _paused_before: float = 0.0
    #: How many of `ended`, the last ones, did so between two calls.
    _ended_between_calls: int = 0

    @property
    def uid(self) -> str:
        """The prompt's."""
        return self.prompt.uid or ""

    @property
    def is_complete(self) -> bool:
        """Whether no further member of it is wanted."""
        return self.stage >= Stage.COMPLETE

    @property
    def is_begun(self) -> bool:
        """Whether any member of it has been admitted."""
        return bool(self.running or self.ended) or self.is_carried

    @property
    def is_sampled(self) -> bool:
        """Whether it may have tokens, the oldest of which are of the weights of its version."""
        return self.is_begun or (self.before is not None and self.before.version is not None)

    @property
    def was_delivered(self) -> bool:
        """Whether an earlier process gave it to its caller."""
        return self.before is not None and self.before.delivered_in is not None

    @property
    def is_carried(self) -> bool:
        """Whether members of it wait to continue."""
        return any(member.is_carried for member in self.waiting)

    def add_members(
        self, count: int, *, step: int, run_seed: int, validate: bool = False, row: int = 0
    ) -> None:
        """Make its members, all of which wait; `row` is that of the first."""
        self.is_shared = count > 1
        for member in range(count):
            identity = Identity(
                uid=self.uid,
                group=self.number,
                member=member,
                step=step,
                run_seed=run_seed,
                validate=validate,
            )
            self.waiting.append(Member(self.prompt, identity, self, row=row + member))

    def limit(self, seconds: float | None, paused_s: Callable[[], float]) -> bool:
        """Give it so many seconds from now on; False where it has a deadline, or gets none.

        Args:
            paused_s: For how long the runtime has paused all work so far, which does not count.
        """
        if self._deadline is not None or seconds is None:
            return False
        self._deadline = Deadline.after(seconds, GROUP_S)
        self._paused_s, self._paused_before = paused_s, paused_s()
        return True

    @property
    def deadline(self) -> Deadline | None:
        """Its own deadline as things stand, while a call has it."""
        if self._deadline is None:
            return None
        return self._deadline.later(self._paused_s() - self._paused_before)

    def record_end_between_calls(self, ended: Ended) -> None:
        """Note that a member has ended while no call had the group."""
        self.forget(ended.member)
        self.ended.append(ended)
        self._ended_between_calls += 1

    def join(self, call: Any) -> list[Ended]:
        """Give the group to this call; it has no deadline until `limit`.

        Returns:
            Members that ended between two calls; they are not in `ended` any more.
        """
        self.call, self._deadline = call, None
        self.delivery, self.known = 0, len(self.ended) - self._ended_between_calls
        between, self._ended_between_calls = self.ended[self.known :], 0
        del self.ended[self.known :]
        for member in (*self.waiting, *(each.member for each in (*self.ended, *between))):
            member.batch = call.batch  # what becomes of it does so in this call
        for each in self.ended:
            each.member.deadline_met = None  # it was that of an earlier call
        return between

    def choose(self, count: int) -> list[Ended]:
        """Choose the members that its consumer gets, in member order; none while it is incomplete.

        Those that ended first, of which a trainer may learn; where these are too few, others that
        did not fail, and then failed ones.
        """
        if len(self.ended) < count:
            return []
        taken = [e for e in self.ended if e.member.log is not None and e.member.log.is_taken]
        if len(taken) >= count:  # an earlier process gave these out
            return sorted(taken, key=_get_number)[:count]
        sound = sum(each.trajectory.trainable for each in self.ended)
        if sound < count and (self.waiting or self.running):
            return []
        return sorted(sorted(self.ended, key=_rank_unfitness)[:count], key=_get_number)

    @property
    def is_overdue(self) -> bool:
        """Whether its own deadline has ended a member, in the call that has it.

        One that its caller had is what that took, whatever ended its members then.
        """
        if self.was_delivered:
            return False
        ended = self.ended[self.known :]
        return any(each.trajectory.limit_source == GROUP_S for each in ended)

    def forget(self, member: Member) -> None:
        """Remove a member that has ended from those that run or wait."""
        self.running.pop(member, None)
        if member in self.waiting:
            self.waiting.remove(member)

    def reopen(self, members: int) -> MemberGroup:
        """Return it for a call that wants so many members; as it was pulled, where it has too few.

        One that was complete for another call has cancelled the members not wanted there.
        """
        if self.is_complete and len(self.ended) < members:
            return self.restart()
        self.stage = min(self.stage, Stage.REWARDED)
        return self

    def restart(self) -> MemberGroup:
        """Make a group of the same prompt, without members, as it was when it was pulled."""
        return MemberGroup(self.number, self.prompt, self.source)


def _get_number(ended: Ended) -> int:
    return ended.member.identity.member


def _rank_unfitness(ended: Ended) -> int:
    """Sort what is wanted less after what is wanted more."""
    if ended.trajectory.trainable:
        return 0
    return 2 if ended.trajectory.outcome is Outcome.FAILED else 1
