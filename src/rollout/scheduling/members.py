"""Members and their groups: a prompt, from when it was pulled until its call has judged it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import attrs

from rollout.chat.trajectory import Group, Trajectory
from rollout.limits import Clock, Deadline
from rollout.seeds import Identity
from rollout.types import Outcome, Prompt

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Limit of a group, as `Trajectory.limit_source` names it.
GROUP_S = "scheduling.groups.group_s"


@attrs.define(eq=False, weakref_slot=False)
class Member:
    """One trajectory to be run, from admission to its outcome.

    Attributes:
        log: Its part of the journal, a `TrajectoryLog`; None where there is none.
        running: Its `TrajectoryRun`, or the `RewardCall` of its reward, while there is one.
        slot_wait: What ends its wait for a slot.
        cancel_reason: Set once it has been cancelled.
        deadline_met: The deadline of its call or group, where that ends it.
        clock: Its limits, once it has a slot.
        is_carried: It is carried to the next call: its task waits, without a slot.
        is_finished: Whether it has its outcome.
        concluding_since: When its agent ended, or its trajectory began to wait for others of its
            group, on the loop's clock; None before.
        batch: Number of the call that admitted it, for events.
        began: When its first attempt did, for events; None where it has not.
    """

    prompt: Prompt
    identity: Identity
    group: MemberGroup
    log: Any = None
    running: Any = None
    slot_wait: anyio.CancelScope | None = None
    cancel_reason: str | None = None
    deadline_met: Deadline | None = None
    clock: Clock | None = None
    is_carried: bool = False
    is_finished: bool = False
    concluding_since: float | None = None
    batch: int = 0
    began: float | None = None

    @property
    def tokens(self) -> int | None:
        """Sampled so far, while its agent runs; else None."""
        tokens: int | None = None if self.running is None else self.running.tokens
        return tokens

    @property
    def was_finished(self) -> bool:
        """Whether an earlier process finished it, with all its rewards."""
        return self.log is not None and self.log.recorded.end is not None

    @property
    def was_taken(self) -> bool:
        """Whether a caller of an earlier process had it."""
        return self.log is not None and self.log.recorded.is_delivered

    @property
    def is_ending(self) -> bool:
        """Whether it was cancelled, or its call's or group's time is over."""
        return self.cancel_reason is not None or self.deadline_met is not None

    def can_cancel(self, uid: str | None, member: int | None) -> bool:
        """Whether a cancellation of this prompt and member, None for all, is still to reach it."""
        is_meant = uid in (None, self.identity.uid) and member in (None, self.identity.member)
        return is_meant and self.cancel_reason is None

    def set_running(self, running: Any) -> None:
        """Note what is cancelled with the member from now on; at once where that is ending."""
        self.running = running
        if self.is_ending:
            running.cancel()


def cancel_members(
    members: Iterable[Member], reason: str | None = None, *, deadline: Deadline | None = None
) -> None:
    """Cancel agents, rewards, or waits for a slot of members, and whatever of them comes later.

    Args:
        reason: Why; the first one stays.
        deadline: That which is over, where it is for this.
    """
    for member in members:
        member.cancel_reason = member.cancel_reason or reason
        member.deadline_met = member.deadline_met or deadline
        for code in (member.running, member.slot_wait):
            if code is not None:
                code.cancel()


class SourceCallKey(NamedTuple):
    """Identifies a `collect` or `stream_groups`: `number` counts those of its step, from 0."""

    step: int
    number: int = 0


class RecordedGroup(NamedTuple):
    """What the journal has of a group whose members an earlier process began.

    Attributes:
        step: Of the call that began them.
        call: The number of the group among those of its step with this uid.
        delivered_in: The call that delivered it; None: none did.
        version: The oldest weights that sampled for it; None: none did, or it was delivered.
    """

    step: int
    call: int
    delivered_in: SourceCallKey | None
    version: int | None


@attrs.define(eq=False)
class MemberGroup:
    """A prompt, and its members: each that counts is in `waiting`, `running` or `ended`.

    Attributes:
        number: Its number among the prompts of its call, or among all that the runtime pulled.
        before: What the journal has of it, where an earlier process began it.
        version: The oldest of the weights that sampled for it, or may have; None before a call
            adopted it, where the journal has no tokens of it either.
        is_complete: Whether the wanted members have ended; no other is wanted.
        is_rewarded: Whether `group_reward` was called too, where there is one.
        waiting: Not admitted, or carried.
        running: Admitted and not ended.
        ended: With their trajectories, in the order in which they did.
        call: The call that has it; None while it is a leftover.
        refill_failed: Whether members of it that fail run again.
        source: The `PromptSource` that gave it, until a call adopts it.
        is_shared: Whether several members begin with its prompt.
        deadline: Its own in this call, less the time for which engines had paused until then.
        is_overdue: Whether that has ended a member.
        result: What its consumer gets, once it is judged.
        delivery: Number of the journal's record that this call gives it to its caller; 0: none.
    """

    number: int
    prompt: Prompt
    before: RecordedGroup | None = None
    version: int | None = None
    is_complete: bool = False
    is_rewarded: bool = False
    waiting: list[Member] = attrs.field(factory=list)
    running: list[Member] = attrs.field(factory=list)
    ended: dict[Member, Trajectory] = attrs.field(factory=dict)
    call: Any = None
    refill_failed: bool = False
    source: Any = None
    is_shared: bool = False
    deadline: Deadline | None = None
    is_overdue: bool = False
    result: Group | None = None
    delivery: int = 0

    @property
    def uid(self) -> str:
        """The prompt's."""
        return self.prompt.uid or ""

    @property
    def is_carried(self) -> bool:
        """Whether members of it wait to continue."""
        return any(member.is_carried for member in self.waiting)

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

    def add_members(self, count: int, *, step: int, run_seed: int, validate: bool = False) -> None:
        """Make its members, all of which wait."""
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
            self.waiting.append(Member(self.prompt, identity, self))

    def join(self, call: Any) -> None:
        """Give the group to this call, in which it has no deadline yet."""
        self.call, self.source, self.delivery = call, None, 0
        self.refill_failed = call.groups.policy.refill_failed
        self.deadline, self.is_overdue = None, False
        for member in (*self.waiting, *self.ended):
            member.batch = call.number  # what becomes of it does so in this call
        for member in self.ended:
            member.deadline_met = None  # it was that of an earlier call

    def choose(self, count: int) -> dict[Member, Trajectory]:
        """Choose the members that its consumer gets, in member order; none while it is incomplete.

        Those that ended first, of which a trainer may learn; where these are too few, others that
        did not fail, and then failed ones.
        """
        if len(self.ended) < count:
            return {}
        chosen = [member for member in self.ended if member.was_taken]
        if len(chosen) < count:  # else an earlier process gave these out
            sound = sum(each.trainable for each in self.ended.values())
            if sound < count and (self.waiting or self.running):
                return {}
            chosen = sorted(self.ended, key=lambda each: _rank_unfitness(self.ended[each]))[:count]
        chosen = sorted(chosen, key=lambda each: each.identity.member)[:count]
        return {member: self.ended[member] for member in chosen}

    def forget(self, member: Member) -> None:
        """Remove a member that has ended from those that run or wait."""
        for members in (self.running, self.waiting):
            if member in members:
                members.remove(member)

    def release(self) -> None:
        """Forget its members, which refer to it: all would live until a full collection."""
        self.waiting, self.ended = [], {}

    def restart(self) -> MemberGroup:
        """Make a group of the same prompt and number, without members."""
        return MemberGroup(self.number, self.prompt)


def _rank_unfitness(trajectory: Trajectory) -> int:
    """Sort what is wanted less after what is wanted more."""
    if trajectory.trainable:
        return 0
    return 2 if trajectory.outcome is Outcome.FAILED else 1
