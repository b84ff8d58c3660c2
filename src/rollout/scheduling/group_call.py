"""A call of `collect` or `stream_groups`: groups pulled while it wants some, taken or left."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from rollout.chat.group import Group
from rollout.errors import PromptError, SourceEnded
from rollout.limits import NEVER, Deadline
from rollout.scheduling.call_arguments import check_group_call
from rollout.scheduling.calls import Call
from rollout.scheduling.endings import describe_ending
from rollout.scheduling.groups import Groups, Staleness, Wanted
from rollout.scheduling.member_group import Stage
from rollout.scheduling.selection import Selection, call_accept, find_accept
from rollout.scheduling.sources import check_source
from rollout.scopes import find_propagating
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.errors import JournalError
    from rollout.scheduling.groups import Leftovers
    from rollout.scheduling.member_group import Ended, Member, MemberGroup
    from rollout.scheduling.scheduler import Scheduler
    from rollout.scheduling.selection import Accept
    from rollout.scheduling.sources import PromptSource

#: A consumer that waits for so long, and for itself, is told why.
HINT_S = 5.0
#: Different rewards of a refused group that an error lists.
LISTED = 8


class GroupCall(Call):
    """A call of `collect` or `stream_groups`; its members may outlive it.

    Args:
        accept: Which groups are taken; None: all.

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
        accept: Accept | None,
        *,
        is_replayed: bool,
        **options: Any,
    ) -> None:
        super().__init__(scheduler, groups, **options)
        self.source, self._queue, self._accept = source, scheduler.queue, accept
        self.is_replayed = is_replayed
        self.taken_names: set[str] = set()
        self.selection = Selection(by_group=scheduler.rewards_groups)
        self._count_of_ended = 0
        self._pull_wait = anyio.CancelScope()
        self._has_noted_end = False

    @property
    def name(self) -> str:  # type: ignore[override]
        """The method's."""
        return "stream_groups" if self.groups.wanted.groups is None else "collect"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """See `Call.running`."""
        self._queue.add_call(self)
        try:
            async with super().running():
                yield
        finally:
            self._queue.remove_call(self)

    # What its consumer gets.

    async def receive_group(self) -> Group | None:
        """Return the next accepted group; None where there will be none.

        Raises:
            BaseException: What the call ends with.
        """
        while True:
            group = self.groups.take()
            if group is not None:
                self.change()
                await self.record_delivery([group])
                result = get_result(group)
                self.selection.note_accepted(result.trajectories)
                return result
            if self.failure is not None:
                raise self.failure
            if self.groups.is_complete:
                if not self._is_leaving:  # else its caller has left, and learns nothing
                    self.note_source_end()
                return None
            with anyio.move_on_after(HINT_S) as scope:
                await self._changed.wait()
            if scope.cancelled_caught and self.groups.waits_for:
                self._tally.hint("update_weights", self.groups.waits_for)

    async def receive_all(self) -> list[MemberGroup]:
        """Return as many accepted groups as are wanted, or what there is; `find_error` says why.

        `record_delivery` must follow, or `take_back`.
        """
        while not (self.groups.is_complete or self.failure is not None):
            await self._changed.wait()
        self.groups.stop()
        taken = self.groups.take_all()
        for group in taken:
            self.selection.note_accepted(get_result(group).trajectories)
        return taken

    def find_error(self, groups: int, found: int) -> BaseException | None:
        """Find the error that a call ends with which found so many groups; None: no error."""
        if self.failure is not None:
            return self.failure
        is_short = found < groups - self.groups.counts["dropped"]
        if self._met_deadline and (is_short or self._config.on_deadline == "raise"):
            return self.deadline.error()
        if is_short and self.source.is_over and not self._is_cancelled:
            return SourceEnded(f"the source ended: {found} of {groups} groups")
        return None

    async def record_delivery(self, groups: Sequence[MemberGroup]) -> JournalError | None:
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
            self._leave_to_next_call(groups)
        self.change()

    def note_missing(self, missing: int) -> None:
        """Record that the caller gets so many groups fewer than it wanted, and no error."""
        self._log.note_missing(self.step, missing)

    def note_source_end(self) -> None:
        """Forget a source that is over, as the caller learns now: given again, it begins again."""
        if self.source.is_over and not self._has_noted_end:
            self._has_noted_end = True
            self._queue.forget(self.source)

    def metrics(self) -> dict[str, float]:
        """See `Selection`."""
        running = [member.tokens for member in self._running]
        return {**self.groups.count(), **self.selection.metrics(running)}

    # Its end.

    async def _return_groups(self, left: Leftovers) -> None:
        for group in left.groups:
            if not group.is_complete:  # else its members end in this call, which waits
                group.call = None
        await self._runs.carry(left.carried)
        for member in left.carried:
            self._running.pop(member, None)
            self.selection.note_cut_off(member.tokens)
        carried = [group for group in left.groups if group.is_carried]
        others = [group for group in left.groups if not group.is_carried]
        self._leave_to_next_call(carried)  # at once: `cancel` finds them while others clean up
        await self._wait_for_members()
        self._leave_to_next_call(others)

    def _leave_to_next_call(self, groups: Sequence[MemberGroup]) -> None:
        for group in groups:
            group.call = None
        self._queue.keep(groups)

    def close(self) -> None:
        """End it because the runtime is being closed."""
        super().close()
        self._is_leaving = True

    def change(self) -> None:
        """Wake the tasks that wait for a change of this call."""
        super().change()
        self._pull_wait.cancel()

    def _fail(self, error: BaseException) -> None:
        """End the call with this error, unless it has all it wants: what else runs is surplus."""
        if not self.groups.has_all:
            self.end_with(error)

    # Where members come from.

    async def admit(self) -> None:
        """See `Call.admit`."""
        await self._pull_again()
        await super().admit()

    async def _pull_again(self) -> None:
        """Bring the source of a resumed call where it stood: the journal has what it gave then."""
        source = self.source
        for _ in range(self._log.count_pulls(self.step)):
            if source.can_pull and source.failure is None:
                self._queue.ask(source, self.step)
            while source.is_pulling:
                await self._changed.wait()

    async def _find_next_member(self) -> Member | None:
        while True:
            member = self.groups.next_member()
            if member is not None:
                return member
            if self.groups.wants_group and self._adopt_one():
                continue
            self._check_source()
            with anyio.CancelScope() as self._pull_wait:
                if self.groups.wants_group and self.source.can_pull:
                    await self._runs.wait_for_slot()
                    if not self._pull_wait.cancel_called:  # else nothing may be as it was
                        self._queue.ask(self.source, self.step)
                await anyio.sleep_forever()

    def _adopt_one(self) -> bool:
        found = self._queue.pop_group(self)
        if found is None:
            return False
        found = found.reopen(self.groups.wanted.members)
        group = self.groups.refresh(found)
        if group is not found:
            self.scheduler.drop_carried(found)
        for ended in group.join(self):
            self._note_end_between_calls(group, ended)
        self._queue.name_members(group, self)
        self.groups.adopt(group)
        if self.groups.can_judge(group):
            self.scheduler.start(lambda: self._guard(lambda: self._complete(group)))
        return True

    def _note_end_between_calls(self, group: MemberGroup, ended: Ended) -> None:
        """Note a member that ended while no call had its group; its outcome was counted then."""
        trajectory, is_counted = ended.trajectory, self.groups.record_end(ended)
        self.selection.note_end(trajectory)
        group.known += is_counted
        if not is_counted:
            self._restart(ended.member)
        self._count_of_ended += is_counted
        self._bad.add(trajectory, is_free=not is_counted)
        if is_counted:
            self._check_failures(trajectory)

    def _check_source(self) -> None:
        """Fail with what the source raised, or stop pulling where it is over."""
        source = self.source
        if source.failure is not None and not self.groups.has_all:  # else the next call fails
            error, source.failure = source.failure, None
            self._fail(error)
        elif not self.groups.wants_group or source.is_pulling:
            return
        elif source.is_over or self.is_replayed:
            self.groups.stop_pulling()
            self.change()

    def _note_admitted(self, member: Member) -> None:
        self._tally.admitted += 1

    def _restart(self, member: Member) -> None:
        self.selection.refilled += 1
        self.groups.restart(member.replace())

    # What becomes of members and groups.

    def _note_end(self, ended: Ended, *, is_surplus: bool, is_again: bool) -> None:
        self._count_of_ended += not is_again
        self._count(ended, is_surplus=is_surplus, is_again=is_again)
        self.selection.note_end(ended.trajectory)
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
        self.selection.note_rewards(each.trajectory for each in new)
        return True

    async def _hand_over(self, group: MemberGroup, wanted: Sequence[Ended]) -> None:
        # Nothing is delivered before the journal has it.
        failure = await self._log.wait_written(wanted, self.deadline.at, lambda: self._ends_rewards)
        if failure is not None:
            self._fail(failure)
        result = Group.of(group.uid, group.prompt, [each.trajectory for each in wanted])
        is_accepted = True if _were_delivered(wanted) else self._call_accept(result)
        if is_accepted is None:
            group.stage = Stage.UNJUDGED
            return
        group.result = result
        self._emit_group_ended(wanted, "accepted" if is_accepted else "refused")
        if is_accepted:
            self.groups.accept(group)
        else:
            self._log.note_dropped(group)
            self.groups.refuse(group, _describe_refusal(result, self._accept))

    def _call_accept(self, group: Group) -> bool | None:
        """What `accept` returns; None where it raises, which ends the call, or is not called."""
        if self.groups.has_refused_too_many:  # by groups that ended in the same moment
            return None
        try:
            return call_accept(self._accept, group)
        except BaseException as error:  # as of an agent: it is its call's alone
            is_own = isinstance(error, GeneratorExit)  # no coroutine is closed in a plain call
            if not is_own and find_propagating(error) is not None:
                raise
            self._fail(error)
            return None


def _describe_refusal(group: Group, accept: object) -> str:
    """Say which function refused a group, its rewards, and which member failed first."""
    name = getattr(accept, "__name__", type(accept).__name__)
    rewards = Counter(
        "unknown" if each.reward is None else f"{each.reward:g}" for each in group.trajectories
    )
    listed = ", ".join(f"{times} × {reward}" for reward, times in rewards.most_common(LISTED))
    what = f"{group.uid!r}, by {name} with the rewards {listed}"
    lost = [each for each in group.trajectories if not each.trainable]
    failed = [each for each in lost if each.cause is not None] or lost
    return f"{what}; {describe_ending(failed[0])}" if failed else what


def get_result(group: MemberGroup) -> Group:
    """Return what the consumer of an accepted group gets."""
    assert group.result is not None
    return group.result


def _were_delivered(wanted: Sequence[Ended]) -> bool:
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
    """Make a call of `collect`, or of `stream_groups`, which has as many groups as it takes.

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
    accept, staleness, deadline = find_accept(policy.accept), None, NEVER
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
    missing, prompts = scheduler.log.take_missing(step), scheduler.queue.find_source(source)
    found = Groups(wanted, lambda: engines.weight_version)
    found.counts["dropped"] = missing or 0
    return GroupCall(
        scheduler,
        found,
        prompts,
        accept,
        step=step,
        deadline=deadline,
        group_s=policy.group_s,
        is_replayed=missing is not None,
    )
