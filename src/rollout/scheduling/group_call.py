"""A call of `collect` or `stream_groups`: groups pulled while it wants some, taken or left."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from rollout.chat.group import Group
from rollout.errors import PromptError, SourceEnded
from rollout.limits import NEVER, Deadline
from rollout.scheduling.call_arguments import check_group_call, check_source
from rollout.scheduling.calls import Call
from rollout.scheduling.endings import describe_ending
from rollout.scheduling.groups import Groups, Staleness, Wanted
from rollout.scheduling.member_group import Stage, cancel_members
from rollout.scheduling.selection import Selection, call_accept, find_accept
from rollout.scopes import find_propagating

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.errors import JournalError
    from rollout.scheduling.group_queue import PromptSource
    from rollout.scheduling.groups import Leftovers
    from rollout.scheduling.member_group import Ended, Member, MemberGroup
    from rollout.scheduling.run_log import RecordedCall
    from rollout.scheduling.scheduler import Scheduler
    from rollout.scheduling.selection import Accept

#: Reason of carried members whose tokens are too old to take.
STALE = "stale"
#: A consumer that waits for so long, and for itself, gets a hint in the log.
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
        before: RecordedCall,
        **options: Any,
    ) -> None:
        super().__init__(scheduler, groups, **options)
        self.source, self._queue, self._accept = source, scheduler.queue, accept
        self.name = "stream_groups" if groups.wanted.groups is None else "collect"
        self.is_replayed, self._before = before.missing is not None, before
        self.taken_names: set[str] = set()
        self.selection = Selection(by_group=scheduler.rewards_groups)
        self._has_noted_end = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """See `Call.running`."""
        self._queue.restore_groups(self._before.groups)
        self.source.calls += 1
        try:
            async with super().running():
                yield
        finally:
            self.source.calls -= 1
            self.source.release()

    # What its consumer gets.

    async def receive_group(self) -> Group | None:
        """Return the next accepted group; None where there will be none.

        Raises:
            BaseException: What the call ends with.
        """
        hint_at = anyio.current_time() + HINT_S
        while True:
            group = self.groups.take()
            if group is not None:
                self.scheduler.change()
                await self.record_delivery([group])
                result = get_result(group)
                self.selection.note_accepted(result.trajectories)
                return result
            if self.failure is not None:
                await anyio.lowlevel.checkpoint_if_cancelled()  # it may be for this alone
                raise self.failure
            if self.groups.is_complete:
                if not self._is_leaving:  # else its caller has left, and learns nothing
                    self.note_source_end()
                return None
            with anyio.CancelScope(deadline=hint_at) as scope:
                await self.scheduler.wait_change()
            if scope.cancelled_caught:
                hint_at += HINT_S
                if self.groups.waits_for:
                    self._tally.hint("update_weights", self.groups.waits_for)

    async def receive_all(self) -> list[MemberGroup]:
        """Return as many accepted groups as are wanted, or what there is; `find_error` says why.

        `record_delivery` must follow, or `take_back`.
        """
        while not (self.groups.is_complete or self.failure is not None):
            await self.scheduler.wait_change()
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

    async def record_delivery(
        self, groups: Sequence[MemberGroup], missing: int = 0
    ) -> JournalError | None:
        """Record that the caller gets these groups; return why the journal could not, if so.

        The caller gets them all the same. Cancelled meanwhile, it has them taken back.

        Args:
            missing: How many groups fewer than it wanted the caller gets, without an error.
        """
        new = [group for group in groups if not group.delivery]  # else a caller was cancelled
        ended = [each for group in new for each in group.choose(self.groups.wanted.members)]
        number = self._log.note_delivery([each.member for each in ended], self.step, missing)
        for group in new:
            group.delivery = number
        try:
            last = max((group.delivery for group in groups), default=0)
            return await self._log.wait_written(last, self.deadline.at)
        except BaseException:
            self.take_back(groups)
            raise

    def take_back(self, groups: Sequence[MemberGroup]) -> None:
        """Return groups that the caller did not get to this call, or to the next one."""
        if not self.groups.take_back(groups):
            self._queue.keep(groups)
        self.scheduler.change()

    def note_source_end(self) -> None:
        """Forget a source that is over, as the caller learns now; named again, it begins again."""
        if self.source.is_over and not self._has_noted_end:
            self._has_noted_end = True
            self._queue.forget(self.source)

    def metrics(self) -> dict[str, float]:
        """See `Selection`."""
        running = [member.tokens for member in self._list_running()]
        return {**self.groups.count(), **self.selection.metrics(running)}

    # Its end.

    async def _leave(self, left: Leftovers) -> None:
        for group in left.groups:
            if not group.is_complete:  # else its members end in this call, which waits
                group.call = None
        await self.scheduler.carry(left.carried)
        for member in left.carried:  # their requests were cut off, so that all tokens are here
            self.selection.note_cut_off(member.tokens)
        carried = [group for group in left.groups if group.is_carried]
        others = [group for group in left.groups if not group.is_carried]
        self._queue.keep(carried)  # at once, while others clean up
        await super()._leave(left)
        self._queue.keep(others)

    def close(self) -> None:
        """End it because the runtime is being closed."""
        super().close()
        self._is_leaving = True

    def _fail(self, error: BaseException) -> None:
        """End the call with this error, unless it has all it wants: what else runs is surplus."""
        if not self.groups.has_all:
            self.end_with(error)

    # Where members come from.

    async def _admit(self) -> None:
        # Of a resumed call, the source is brought first where it stood then.
        for _ in range(self._before.pull_count):
            if not self.source.is_over and self.source.failure is None:
                self.source.ask(self.step)
            while self.source.is_pulling:
                await self.scheduler.wait_change()
        await super()._admit()

    async def _find_next_member(self) -> Member:
        while (member := self.groups.next_member()) is None:
            if self.groups.wants_group and self._adopt_one():
                continue
            self._check_source()
            if self.groups.wants_group and self.scheduler.has_free_slot and not self.source.is_over:
                self.source.ask(self.step)
            await self.scheduler.wait_change()
        return member

    def _adopt_one(self) -> bool:
        found = self._queue.pop_group(self)
        if found is None:
            return False
        group = self.groups.refresh(found)
        if group is not found:  # its prompt begins again
            cancel_members([each for each in found.waiting if each.is_carried], STALE)
        group.join(self)
        self._queue.name_members(group, self)
        self.groups.adopt(group)
        between, group.between = group.between, []
        for ended in between:  # their outcomes were counted when they ended
            self._count(ended.trajectory, is_wanted=self.groups.record_end(ended) is None)
        if self.groups.can_judge(group):
            self._start_judging(group)
        return True

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
            self.scheduler.change()

    def _note_admitted(self) -> None:
        self._tally.admitted += 1

    # What becomes of groups.

    def _count(self, trajectory: Trajectory, *, is_wanted: bool) -> None:
        self.selection.note_end(trajectory)
        super()._count(trajectory, is_wanted=is_wanted)

    def _note_rewards(self, wanted: Sequence[Ended]) -> None:
        self.selection.note_rewards(each.trajectory for each in wanted)

    async def _hand_over(self, group: MemberGroup, wanted: Sequence[Ended]) -> None:
        result = Group.of(group.uid, group.prompt, [each.trajectory for each in wanted])
        were_taken = bool(wanted) and all(each.member.was_taken for each in wanted)
        is_accepted = True if were_taken else self._call_accept(result)
        if is_accepted is None:
            group.stage = Stage.UNJUDGED
            return
        group.result = result
        self._emit_group_ended(wanted, "accepted" if is_accepted else "refused")
        if is_accepted:
            self.groups.settle(group, "accepted")
        else:
            self._log.note_dropped(group)
            self.groups.settle(group, "refused", _describe_refusal(result, self._accept))

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
        ConfigError: What the policy names cannot be imported.
    """
    config, engines = scheduler.config, scheduler.engines
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
    before = scheduler.log.take_call(step)
    found = Groups(wanted, lambda: engines.weight_version)
    found.counts["dropped"] = before.missing or 0
    return GroupCall(
        scheduler,
        found,
        scheduler.queue.find_source(source),
        accept,
        step=step,
        deadline=deadline,
        group_s=policy.group_s,
        before=before,
    )
