"""A call of `collect` or `stream_groups`: groups pulled while it wants some, taken or left."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from rollout.chat.group import Group
from rollout.errors import PromptError, SourceEnded
from rollout.limits import NEVER, Deadline
from rollout.scheduling.call_arguments import check_group_call
from rollout.scheduling.calls import SURPLUS, Call
from rollout.scheduling.groups import Groups, Staleness, Wanted
from rollout.scheduling.member_group import GroupMember, MemberGroup
from rollout.scheduling.selection import Selection, acceptance
from rollout.scheduling.sources import check_source
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.errors import JournalError
    from rollout.scheduling.prompts import Ended, Member
    from rollout.scheduling.scheduler import Scheduler
    from rollout.scheduling.sources import PromptSource
    from rollout.scheduling.trajectory import MemberHome

#: A consumer that waits for so long, and for itself, is told why.
HINT_S = 5.0


class GroupCall(Call):
    """A call of `collect` or `stream_groups`; its members may outlive it, in the scheduler's tasks.

    Attributes:
        source: Where its prompts come from.
        is_replayed: It returned in an earlier process: what it delivered then is all it has.
        taken_names: Uids of groups that it has adopted.
        selection: What it took of what it had run.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        groups: Groups,
        source: PromptSource,
        *,
        is_replayed: bool,
        **options: Any,
    ) -> None:
        super().__init__(scheduler, groups, **options)
        self.source, self.is_replayed = source, is_replayed
        self.taken_names: set[str] = set()
        self.selection = Selection(by_group=scheduler.rewards_groups)
        self._count_of_ended = 0
        self._changed, self._wait = anyio.Event(), anyio.CancelScope()
        self._is_leaving, self._has_left = anyio.Event(), anyio.Event()
        self._has_told_end = False

    @property
    def name(self) -> str:  # type: ignore[override]
        """The method's."""
        return "stream_groups" if self.groups.wanted.groups is None else "collect"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the call during the block; after it only carried members are left of it."""
        await self.scheduler.open(self)
        try:
            yield
        finally:
            self._is_leaving.set()
            with anyio.CancelScope(shield=True):
                await self._has_left.wait()
            self.scheduler.leave(self)
            self.change()  # a task that still waits for a group learns that there is none

    # What its consumer gets.

    async def next_group(self) -> Group | None:
        """Return the next accepted group; None where there will be none.

        Raises:
            BaseException: What the call ends with.
        """
        while True:
            group = self.groups.take()
            if group is not None:
                self.change()
                await self.give([group])
                result = get_result(group)
                self.selection.accepted(result.trajectories)
                return result
            if self.failure is not None:
                raise self.failure
            if self.groups.is_complete:
                if not self._is_leaving.is_set():  # else its caller has left, and is told nothing
                    self.tell_end()
                return None
            with anyio.move_on_after(HINT_S) as scope:
                await self._changed.wait()
            if scope.cancelled_caught and self.groups.waiting:
                self._tally.hint("update_weights", self.groups.waiting)

    async def all_groups(self) -> list[MemberGroup]:
        """Return as many accepted groups as are wanted, or what there is; `fault` says why.

        `give` must follow, or `take_back`.
        """
        while not (self.groups.is_complete or self.failure is not None):
            await self._changed.wait()
        self.groups.stop()
        taken = self.groups.take_all()
        for group in taken:
            self.selection.accepted(get_result(group).trajectories)
        return taken

    def fault(self, groups: int, found: int) -> BaseException | None:
        """The error that a call ends with which found so many groups; None: no error."""
        if self.failure is not None:
            return self.failure
        is_short = found < groups - self.groups.counts["dropped"]
        if self._met_deadline and (is_short or self._config.on_deadline == "raise"):
            return self.deadline.error()
        if is_short and self.source.is_over and not self._is_cancelled:
            return SourceEnded(f"the source ended: {found} of {groups} groups")
        return None

    async def give(self, groups: Sequence[MemberGroup]) -> JournalError | None:
        """Record that the caller gets these groups; return why the journal could not, if so.

        The caller gets them all the same. Cancelled meanwhile, it has them taken back.
        """
        new = [group for group in groups if not group.delivery]  # else a caller was cancelled
        ended = [each for group in new for each in group.choose(self.groups.wanted.members)]
        number = self._log.note_delivery([each.member for each in ended], self.step)
        for group in new:
            group.delivery = number
        try:
            last = max((group.delivery for group in groups), default=0)
            return await self._log.wait_delivery(last, self.deadline.at)
        except BaseException:
            self.take_back(groups)
            raise

    def take_back(self, groups: Sequence[MemberGroup]) -> None:
        """Return groups that the caller did not get to this call, or to the next one."""
        if not self.groups.take_back(groups):
            for group in groups:
                group.call = None
            self.scheduler.keep(groups)
        self.change()

    def note_missing(self, missing: int) -> None:
        """Record that the caller gets so many groups fewer than it wanted, and no error."""
        self._log.note_missing(self.step, missing)

    def tell_end(self) -> None:
        """Forget a source that is over, as the caller learns now: given again, it begins again."""
        if self.source.is_over and not self._has_told_end:
            self._has_told_end = True
            self.scheduler.forget(self.source)

    def metrics(self) -> dict[str, float]:
        """See `Selection`."""
        running = [member.tokens for member in self._running]
        return {**self.groups.metrics(), **self.selection.metrics(running)}

    # Its life, in a task of the runtime's.

    async def serve(self) -> None:
        """Admit members until the call is left; then end what is not carried."""
        with self.scheduler.calls.running(self):
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch_deadline)
                    tasks.start_soon(self._admit)
                    await self._is_leaving.wait()
                    tasks.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._leave()
                self._has_left.set()

    async def _admit(self) -> None:
        try:
            await self._pull_again()
            await self.admit()
        except Exception as error:  # a bug of ours, or what a source raised
            self.end_with(error)

    async def _pull_again(self) -> None:
        """Bring the source of a resumed call where it stood: the journal has what it gave then."""
        source = self.source
        for _ in range(self._log.count_pulls(self.step)):
            if source.can_be_asked and source.failure is None:
                self.scheduler.ask(source, self.step)
            while source.is_asked:
                await self._changed.wait()

    async def _leave(self) -> None:
        self._end_rewards()
        while self._judging:
            await self._changed.wait()
        left = self.groups.leave(is_over=self.is_closed or not self.scheduler.is_running)
        self.runs.cancel([m for m in left.surplus if not m.is_finished], SURPLUS)
        for group in left.groups:
            if not group.is_settled:  # else its members end in this call, which waits
                group.call = None
        await self.scheduler.suspend(left.carried)
        for member in left.carried:
            self._running.pop(member, None)
            self.selection.cut_off(member.tokens)
        carried = {group: None for group in left.groups if group.is_carried}
        self.scheduler.keep(carried)  # at once: `cancel` finds them while others clean up
        while any(member.group.call is self for member in self.scheduler.live):
            await self._changed.wait()
        rest = [group for group in left.groups if group not in carried]
        for group in rest:
            group.call = None
        self.scheduler.keep(rest)
        self._bad.log()

    def close(self) -> None:
        """End it because the runtime is being closed."""
        super().close()
        self._is_leaving.set()

    def change(self) -> None:
        """Something is not as it was: have everybody look again."""
        self._changed.set()
        self._changed = anyio.Event()
        self._wait.cancel()

    # Where members come from.

    async def _next_member(self) -> GroupMember | None:
        while True:
            member = self.groups.next_member()
            if member is not None:
                return member
            if self.groups.wants_group and self._adopt_one():
                continue
            self._look_at_source()
            with anyio.CancelScope() as self._wait:
                if self.groups.wants_group and self.source.can_be_asked:
                    await self.scheduler.wait_for_slot()
                    if not self._wait.cancel_called:  # else nothing may be as it was
                        self.scheduler.ask(self.source, self.step)
                await anyio.sleep_forever()

    def _adopt_one(self) -> bool:
        found = self.scheduler.next_group(self)
        if found is None:
            return False
        found = found.reopen(self.groups.wanted.members)
        group = self.groups.refresh(found)
        if group is not found:
            self.scheduler.drop_carried(found)
        for ended in group.join(self):
            self._end_alone(group, ended)
        self.scheduler.name_members(group, self)
        self.groups.adopt(group)
        if self.groups.is_whole(group):
            self.runs.start_soon(lambda: self._complete(group))
        return True

    def _end_alone(self, group: MemberGroup, ended: Ended) -> None:
        """Note a member that ended while no call had its group; its outcome was counted then."""
        trajectory, is_counted = ended.trajectory, self.groups.end(ended)
        self.selection.ended(trajectory)
        group.known += is_counted
        if not is_counted:
            self._restart(ended.member)
        self._count_of_ended += is_counted
        self._bad.add(trajectory, is_free=not is_counted)
        if is_counted:
            self._check_failures(trajectory)

    def _look_at_source(self) -> None:
        """Fail with what the source raised, or stop pulling where it is over."""
        source = self.source
        if source.failure is not None and not self.groups.has_all:  # else the next call is told
            error, source.failure = source.failure, None
            self._fail(error)
        elif not self.groups.wants_group or source.is_asked:
            return
        elif source.is_over or self.is_replayed:
            self.groups.stop_pulling()
            self.change()

    @property
    def _home(self) -> tuple[MemberHome, Deadline]:
        return self.scheduler, NEVER  # it may be carried into another call

    def _note_admitted(self, member: GroupMember) -> None:
        self._tally.admitted += 1
        self.scheduler.live[member] = None

    def _restart(self, member: Member) -> None:
        assert isinstance(member, GroupMember)
        self.selection.refilled += 1
        self.groups.restart(self.scheduler.replace_member(member))

    # What becomes of members and groups.

    def _note_end(self, ended: Ended, *, is_surplus: bool, is_again: bool) -> None:
        self._count_of_ended += not is_again
        self._count(ended, is_surplus=is_surplus, is_again=is_again)
        self.selection.ended(ended.trajectory)
        if is_again:
            self._restart(ended.member)

    def _check_failures(self, trajectory: Trajectory) -> None:
        count = self._count_of_ended
        if trajectory.outcome is Outcome.FAILED and self._bad.are_too_many(count, self._config):
            self._fail(self._bad.error(count, self._config))

    async def _reward(self, group: MemberGroup, wanted: Sequence[Ended]) -> bool:
        outcomes, new = [each.trajectory.outcome for each in group.ended], wanted
        if not self.scheduler.wants_reward(group, wanted):  # an earlier call may have counted some
            ended = {each.member for each in group.ended[group.known :]}
            new = [each for each in wanted if each.member in ended]
        if not await super()._reward(group, wanted):
            return False
        for before, (_, _, trajectory) in zip(outcomes, group.ended, strict=True):
            if before is not trajectory.outcome:  # by its reward, or by what cannot be written
                self._tally.outcomes[before] -= 1
                self._tally.outcomes[trajectory.outcome] += 1
                self._bad.add(trajectory)
                self._check_failures(trajectory)
        self.selection.rewarded(each.trajectory for each in new)
        return True

    async def _hand_over(self, group: MemberGroup, wanted: Sequence[Ended]) -> None:
        # Nothing is delivered before the journal has it.
        failure = await self._log.wait_written(wanted, self.deadline.at, lambda: self._ends_rewards)
        if failure is not None:
            self._fail(failure)
        result = Group.of(group.uid, group.prompt, [each.trajectory for each in wanted])
        is_accepted = True if _was_given(wanted) else self._accepts(result)
        if is_accepted is None:
            group.is_unjudged = True
            return
        group.result = result
        self._tell_group(wanted, "accepted" if is_accepted else "refused")
        if is_accepted:
            self.groups.accept(group)
        else:
            self._log.note_dropped(group)
            self.groups.refuse(group, self._describe_refusal(result))


def get_result(group: MemberGroup) -> Group:
    """Return what the consumer of an accepted group gets."""
    assert group.result is not None
    return group.result


def _was_given(wanted: Sequence[Ended]) -> bool:
    """Whether an earlier process delivered these, so that they are accepted unasked."""
    logs = [each.member.log for each in wanted]
    return bool(logs) and all(log is not None and log.is_taken for log in logs)


def make_group_call(
    scheduler: Scheduler,
    source: Any,
    policy: Any,
    step: int,
    *,
    groups: Any = 1,
    is_stream: bool = False,
    max_staleness: Any = None,
    groups_per_step: Any = None,
) -> GroupCall:
    """A call of `collect`, or of `stream_groups`, which has as many groups as its consumer takes.

    Raises:
        PromptError: An argument is wrong; nothing has been started.
        ConfigError: What the policy names cannot be imported, or the weights that a journal
            resumes with were not announced.
    """
    config, engines = scheduler.config, scheduler.engines
    scheduler.log.check_announced()
    check_source(source)
    check_group_call(policy, groups, max_staleness, groups_per_step)
    policy = config.scheduling.groups if policy is None else policy.over(config.scheduling.groups)
    samples = config.scheduling.samples_per_prompt
    if policy.members is not None and policy.members > samples:
        raise PromptError(
            f"policy.members = {policy.members}: expected at most "
            f"scheduling.samples_per_prompt = {samples}"
        )
    accept, staleness, deadline = acceptance(policy.accept), None, NEVER
    if max_staleness is not None and groups_per_step is not None:
        most, per_step = int(max_staleness), int(groups_per_step)  # NumPy's could overflow
        staleness = Staleness(most=most, per_step=per_step, start=engines.weight_version)
    if not is_stream:
        deadline = Deadline.after(config.limits.batch_s, "limits.batch_s")
    wanted = Wanted(
        groups=None if is_stream else int(groups),
        members=policy.members or samples,
        oversample=policy.oversample,
        max_refused=policy.max_refused,
        surplus=policy.surplus,
        on_group_deadline=policy.on_group_deadline,
        refills=config.scheduling.max_retries if policy.refill_failed else 0,
        staleness=staleness,
    )
    missing, prompts = scheduler.log.take_missing(step), scheduler.find_source(source)
    found = Groups(wanted, lambda: engines.weight_version)
    found.counts["dropped"] = missing or 0
    return GroupCall(
        scheduler,
        found,
        prompts,
        step=step,
        deadline=deadline,
        accept=accept,
        group_s=policy.group_s,
        is_replayed=missing is not None,
    )
