"""Calls of `collect` and `stream_groups`: groups of a source, given out once they are accepted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.chat.trajectory import Group
from rollout.errors import PromptError, SourceEnded
from rollout.limits import NEVER, Deadline
from rollout.scheduling.arguments import check_group_call
from rollout.scheduling.calls import Call
from rollout.scheduling.endings import SURPLUS
from rollout.scheduling.groups import Groups, Staleness
from rollout.scheduling.members import cancel_members
from rollout.scheduling.selection import call_accept, describe_refusal, find_accept
from rollout.scheduling.trajectory_events import emit_group_ended
from rollout.scopes import find_propagating

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.errors import JournalError
    from rollout.scheduling.members import Member, MemberGroup
    from rollout.scheduling.scheduler import Scheduler

#: A consumer that waits for so long, and for itself, gets a hint in the log.
HINT_S = 5.0
#: The method whose call wants as many groups as its consumer takes.
STREAM = "stream_groups"
#: Reason of carried members whose tokens are too old to take.
STALE = "stale"


class SourceCall(Call):
    """A call that adopts groups while it wants some, and gives out those that are accepted.

    What it did not give out is left to the next call: see `Groups.take_leftovers`.

    Args:
        source: Where further groups come from.
        policy: A `GroupPolicy`, over that of the configuration; None: that.
        name: "collect"; or "stream_groups", which wants as many groups as its consumer takes.
        groups: How many are wanted otherwise.
        max_staleness, groups_per_step: As of `RolloutRuntime.stream_groups`.

    Attributes:
        key: Identifies it in the journal.
        taken_names: Uids of groups that it has adopted.
        wants_more: Whether its consumer wants more than an earlier process delivered in it.
        is_replayed: It returned in an earlier process: what it delivered then is all it has.

    Raises:
        PromptError: An argument is wrong; nothing has been started.
        ConfigError: What the policy names cannot be imported.
    """

    is_list = False

    def __init__(
        self,
        scheduler: Scheduler,
        source: Any,
        policy: Any,
        *,
        name: str,
        step: int,
        groups: Any = 1,
        max_staleness: Any = None,
        groups_per_step: Any = None,
    ) -> None:
        check_group_call(source, policy, groups, max_staleness, groups_per_step)
        config, engines = scheduler.config.scheduling, scheduler.engines
        policy, samples = (policy or config.groups).over(config.groups), config.samples_per_prompt
        if policy.members is not None and policy.members > samples:
            raise PromptError(
                f"policy.members = {policy.members}: expected at most "
                f"scheduling.samples_per_prompt = {samples}"
            )
        staleness = None
        if max_staleness is not None:
            most, per_step, start = int(max_staleness), int(groups_per_step), engines.weight_version
            staleness = Staleness(most=most, per_step=per_step, start=start)
        wanted, deadline = None, NEVER
        if name != STREAM:
            wanted = int(groups)
            deadline = Deadline.after(scheduler.config.limits.batch_s, "limits.batch_s")
        super().__init__(
            scheduler,
            Groups(
                wanted,
                policy.members or samples,
                policy,
                staleness=staleness,
                version=lambda: engines.weight_version,
            ),
            name=name,
            step=step,
            deadline=deadline,
        )
        self._accept = find_accept(self.groups.policy.accept)
        self.source, self.taken_names = scheduler.find_source(source), set[str]()
        # What an earlier process recorded of the call. Until the consumer wants more than was
        # delivered then, the source is not asked.
        self._before = before = scheduler.log.take_call(step)
        self.key = before.key
        self._delivered = sum(group.was_delivered for group in before.groups)
        self.wants_more = not self._delivered
        has_all = wanted is not None and self._delivered >= wanted
        self.is_replayed = has_all or before.missing is not None

    def _begin(self) -> None:
        """Queue the groups that the journal has for it."""
        self.scheduler.keep(self._before.groups)

    async def _end_members(self) -> None:
        """Leave groups to the next call: those that are carried at once, others when all ended."""
        left = self.groups.take_leftovers(may_carry=not self.is_closed)
        cancel_members(left.surplus, SURPLUS)
        for group in left.groups:
            if not group.is_complete:  # else its members end in this call, which waits
                group.call = None
        await self.scheduler.carry(left.carried)
        for member in left.carried:  # their requests were cut off, so that all tokens are here
            self.selection.note_cut_off(member.tokens)
        carried = [each for each in left.groups if each.is_carried]
        self.scheduler.keep(carried)
        await self._wait_members()
        self.scheduler.keep([each for each in left.groups if each not in carried])

    # Groups that it adopts.

    async def _admit(self) -> None:
        """Admit members, once the source of a resumed call is where it stood then."""
        source = self.source
        for _ in range(self._before.pull_count):
            while source.is_pulling:  # for another call
                await self.scheduler.wait_change()
            if not source.is_over and source.failure is None:
                source.ask(self.key)
            while source.is_pulling:
                await self.scheduler.wait_change()
        # Only now: without these groups the call may be complete, and end.
        self.groups.counts["dropped"] = self._before.missing or 0
        self.scheduler.change()
        await super()._admit()

    def _adopt_group(self) -> bool:
        """Adopt a group that was pulled before; where there is none, ask the source."""
        found = self.scheduler.pop_group(self) if self.groups.wants_group else None
        if found is None:
            return self._ask_source()
        group = self.groups.refresh(found)
        if group is not found:  # its prompt begins again
            cancel_members([each for each in found.waiting if each.is_carried], STALE)
        self._make_members(group)
        group.join(self)
        self.groups.adopt(group)
        for trajectory in group.ended.values():
            self.selection.note_end(trajectory)
        if self.groups.can_judge(group):
            self._start_judging(group)
        return True

    def _make_members(self, group: MemberGroup) -> None:
        """Make the members of a group that has none yet, with a uid that is new to the call."""
        if not (group.is_begun or group.waiting):
            uid, count = group.uid, 1
            while group.before is None and group.uid in self.taken_names:
                count += 1
                group.prompt = msgspec.structs.replace(group.prompt, uid=f"{uid}@{count}")
            step = self.step if group.before is None else group.before.step
            samples = self._config.samples_per_prompt
            group.add_members(samples, step=step, run_seed=self.scheduler.run_seed)
            self.scheduler.log.enrol(group)
        self.taken_names.add(group.uid)

    def _ask_source(self) -> bool:
        """Ask for a prompt while a slot is free; fail with what was raised, or note the end.

        True where that was not needed: a later call of an earlier process had one, which is kept.
        """
        source = self.source
        if source.failure is not None and not self.groups.has_all:  # else the next call fails
            error, source.failure = source.failure, None
            self._fail(error)
        has_given = any(group.was_delivered for group in self.groups.open)  # it may need no more
        if not self.groups.wants_group or source.is_pulling or has_given:
            return False
        is_new = self.wants_more and not self.is_replayed
        more = self.scheduler.log.take_more(self.key) if is_new else None
        if more is not None:
            self.scheduler.keep([more])
        elif source.is_over or (self.is_replayed and not self.groups.open):
            self.groups.stop()
            self.scheduler.change()
        elif self.scheduler.has_free_slot and is_new:
            source.ask(self.key)
        return more is not None

    async def _settle_group(self, group: MemberGroup, wanted: Mapping[Member, Trajectory]) -> None:
        """Have `accept` judge a group; where it raises, which ends the call, the group is left."""
        result = Group(uid=group.uid, prompt=group.prompt, trajectories=tuple(wanted.values()))
        were_taken = bool(wanted) and all(member.was_taken for member in wanted)
        if self.groups.has_refused_too_many and not were_taken:  # by groups of the same moment
            return
        try:
            is_accepted = were_taken or call_accept(self._accept, result)
        except BaseException as error:  # as of an agent: it is its call's alone
            is_own = isinstance(error, GeneratorExit)  # no coroutine is closed in a plain call
            if not is_own and find_propagating(error) is not None:
                raise
            self._fail(error)
            return
        group.result = result
        verdict = "accepted" if is_accepted else "refused"
        emit_group_ended(self.scheduler.events, wanted, verdict)
        why = "" if is_accepted else describe_refusal(result, self._accept)
        if not is_accepted:
            self.is_replayed = False
            self.scheduler.log.note_dropped(group)
        self.groups.settle(group, verdict, why)

    # What its consumer takes.

    async def take(self) -> MemberGroup | None:
        """Take the next accepted group; None where there is none: `find_error` says why.

        `record` must follow, or `take_back`.
        """
        hint_at = anyio.current_time() + HINT_S
        while (group := self.groups.take()) is None:
            if self.failure is not None or self.groups.is_done:
                return None
            had = self.groups.consumed + self.groups.counts["refused"]
            if not self.wants_more and had >= self._delivered:
                self.wants_more = True
                self.scheduler.change()
            with anyio.CancelScope(deadline=hint_at) as scope:
                await self.scheduler.wait_change()
            if scope.cancelled_caught:
                hint_at += HINT_S
                if self.groups.waits_for:
                    self._tally.hint("update_weights", self.groups.waits_for)
        self.scheduler.change()
        return group

    async def record(self, groups: Sequence[MemberGroup], missing: int = 0) -> JournalError | None:
        """Record that the caller gets these groups; return why the journal could not, if so.

        The caller gets them all the same. Cancelled meanwhile, it has them taken back.

        Args:
            missing: How many groups fewer than it wanted the caller gets, without an error.
        """
        log, count = self.scheduler.log, self.groups.members
        new = [group for group in groups if not group.delivery]  # else a caller was cancelled
        members = [member for group in new for member in group.choose(count)]
        number = log.note_delivery(members, self.key, missing)
        for group in new:
            group.delivery = number
        try:
            last = max((group.delivery for group in groups), default=0)
            failure = await log.wait_written(last, self.deadline.at)
        except BaseException:
            self.take_back(groups)
            raise
        for group in groups:
            group.release()
        return failure

    def take_back(self, groups: Sequence[MemberGroup]) -> None:
        """Return groups that the caller did not get to this call, or to the next one."""
        if self.is_ending:
            self.scheduler.keep(groups)
        else:
            self.groups.take_back(groups)
        self.scheduler.change()

    def note_accepted(self, groups: Sequence[MemberGroup]) -> None:
        """Count what the caller gets."""
        for group in groups:
            if group.result is not None:
                self.selection.note_accepted(group.result.trajectories)

    def note_source_end(self) -> None:
        """Forget a source that is over, as the caller learns now; named again, it begins again."""
        if self.source.is_over:
            self.scheduler.forget_source(self.source)

    def metrics(self) -> dict[str, float]:
        """What it took so far of what it had run; see `rollout.scheduling.selection`."""
        running = [member.tokens for member in self.list_members(has_slot=True)]
        return {**self.groups.count(), **self.selection.metrics(running)}

    def find_error(self, found: int) -> BaseException | None:
        """Find the error that `collect` ends with, if any.

        That is what it failed with, as where the runtime was closed; a `LimitExceeded` where its
        time is over and groups are missing, or that is an error; or `SourceEnded`.

        Args:
            found: How many groups its caller has received.
        """
        if self.failure is not None:
            return self.failure
        wanted = self.groups.wanted or 0
        is_short = found < wanted - self.groups.counts["dropped"]
        if self._met_deadline and (is_short or self._config.on_deadline == "raise"):
            return self.deadline.error()
        if is_short and self.source.is_over and not self._is_cancelled:
            return SourceEnded(f"the source ended: {found} of {wanted} groups")
        return None


class GroupStream(AsyncIterator[Group]):
    """Accepted groups as they finish; ends where there will be no more."""

    def __init__(self, call: SourceCall) -> None:
        self._call = call

    async def receive(self) -> Group | None:
        """The next accepted group; None where there will be none.

        Raises:
            PromptError, LimitExceeded, RolloutError: As `RolloutRuntime.collect`.
        """
        call = self._call
        group = await call.take()
        if group is not None:
            await call.record([group])
            call.note_accepted([group])
            return group.result
        if call.failure is not None:
            raise call.failure
        if not call.is_leaving:  # else its caller has left, and learns nothing
            call.note_source_end()
        return None

    async def __anext__(self) -> Group:
        try:
            group = await self.receive()
        except StopAsyncIteration as error:  # else the loop ends as if all was well
            raise RuntimeError("the source, or accept, raised StopAsyncIteration") from error
        if group is None:
            raise StopAsyncIteration
        return group

    def metrics(self) -> dict[str, float]:
        """What the stream took so far of what it had run; see `rollout.scheduling.selection`."""
        return self._call.metrics()
