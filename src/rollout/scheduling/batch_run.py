"""One call of `generate` or `stream`: its members admitted, run and delivered."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import anyio

from rollout.errors import RolloutError
from rollout.scheduling.ended_groups import Ended, EndedGroups
from rollout.scheduling.endings import CLOSED, BadEndings
from rollout.scheduling.finished import unstarted
from rollout.scheduling.member_runs import CLOSED_MEANWHILE
from rollout.scheduling.trajectory_events import LOST, tell_ended, tell_group_ended, tell_lost
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractContextManager

    from rollout.chat.trajectory import Trajectory
    from rollout.config import SchedulingConfig
    from rollout.containment import Containment
    from rollout.limits import Deadline
    from rollout.observe.event_stream import EventStream
    from rollout.observe.tally import Tally
    from rollout.scheduling.journal.open_journal import OpenJournal
    from rollout.scheduling.journal.trajectory_log import TrajectoryLog
    from rollout.scheduling.member_runs import MemberRuns
    from rollout.scheduling.prompts import Member
    from rollout.scheduling.rewards.score import Rewarding
    from rollout.scheduling.trajectory import AgentRun

    #: Takes a finished trajectory and its row; may wait, and holds the trajectory's place.
    Deliver = Callable[[int, Trajectory], Awaitable[None]]
    #: Takes one at once.
    Keep = Callable[[int, Trajectory], None]


class BatchRun:
    """Members of one call, run under the runtime's limit on trajectories in flight.

    Attributes:
        batch: Number of the call, for events.
        began: When it was made, on the loop's clock.
        has_groups: See `MemberHome`.
    """

    def __init__(
        self,
        *,
        members: Sequence[Member],
        runs: MemberRuns,
        rewarding: Rewarding,
        deadline: Deadline,
        config: SchedulingConfig,
        tally: Tally,
        events: EventStream,
        journal: OpenJournal | None = None,
    ) -> None:
        self.batch = 0
        self.began = anyio.current_time()
        self._events = events
        self._of_group: defaultdict[int, list[Ended]] = defaultdict(list)
        self._left_of_group: Counter[int] = Counter()
        self.members = members
        self._runs = runs
        self._rewarding = rewarding
        self._deadline = deadline
        self._config = config
        self._tally = tally
        self._journal = journal
        self._deliver: Deliver
        self._keep: Keep | None = None
        #: What `_keep` gets once the journal has it, in the order of its records.
        self._unkept: deque[tuple[Member, Trajectory]] = deque()
        self._waiting = iter(_by_priority(members))
        self._bad = BadEndings(tally)
        self.has_groups = any(member.identity.member for member in members)
        self._groups: EndedGroups | None = None
        #: Groups whose members are run again, because their reward is not known yet.
        self._unrewarded: set[int] = set()
        if rewarding.group is not None:
            self._groups = EndedGroups(Counter(m.identity.group for m in members))
            self._unrewarded = {
                m.identity.group for m in members if m.log is None or not m.log.is_finished
            }
        self._met_deadline = False
        self._is_closed = False
        #: Rows whose end could not be written to the journal; they are not delivered.
        self.unwritten: list[tuple[int, Trajectory]] = []
        self._unwritten_error: RolloutError | None = None

    def cancel(self, uid: str | None, member: int | None, reason: str) -> int:
        """Cancel the members that match, also those not started yet; how many there were."""
        chosen = [m for m in self.members if m.is_meant(uid, member)]
        self._runs.cancel(chosen, reason)
        return len(chosen)

    def close(self) -> None:
        """Cancel every member, because the runtime is being closed; they are delivered as usual."""
        self._is_closed = True
        self.cancel(None, None, CLOSED)

    @property
    def step(self) -> int:
        """The trainer's."""
        return self.members[0].identity.step if self.members else 0

    def unfinished(self) -> dict[Member, bool]:
        """Members without an outcome, and True for those that wait for others of their group."""
        waiting = set() if self._groups is None else self._groups.waiting
        return {member: member in waiting for member in self.members if not member.is_finished}

    async def run(self, deliver: Deliver) -> None:
        """Run every member and deliver each trajectory once.

        Cancellation ends every member, bounded, and passes through.

        Raises:
            LimitExceeded: More members failed than `scheduling.max_failures` allows, or the time
                was over and `scheduling.on_deadline` is "raise"; every member has been delivered.
            RolloutError: `close` was called; every member has been delivered.
        """
        self._deliver = deliver
        await self._run_all()
        self._raise_final_error()

    async def run_keeping(self, keep: Keep) -> None:
        """As `run`, for a receiver that never waits: no place waits for the journal either."""
        self._keep = keep
        if self._journal is None:
            await self._run_all()
        else:
            with self._journal.telling(self._keep_written):
                await self._run_all()
                await self._keep_all()
        self._raise_final_error()

    async def _run_all(self) -> None:
        self._tally.admitted += len(self.members)
        for member in self.members:
            member.batch = self.batch
        if self._events.tells_all:
            self._left_of_group.update(m.identity.group for m in self.members)
        try:
            await self._runs.run(partial(self._runs.admit, self))
        finally:
            lost = [member for member in self.members if not member.is_finished]
            self._tally.outcomes[Outcome.CANCELLED] += len(lost)
            if self._events.is_on:
                tell_lost(self._events, lost, LOST)
            self._bad.log()

    def _raise_final_error(self) -> None:
        error = self._final_error()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and only the collector would end that

    async def next_member(self) -> Member | None:
        """See `MemberSource`; what the journal has whole is delivered, and takes no place."""
        for member in self._waiting:
            recorded, log, group = None, member.log, member.identity.group
            if log is not None and log.is_finished and group not in self._unrewarded:
                recorded = log.finished(member.named_prompt, group)
            if recorded is None:
                return member
            await anyio.lowlevel.checkpoint()
            self._finish(member, recorded, is_recorded=True)
            if self._events.is_on:
                self._tell([Ended(member.row, member, recorded)])
            await self._hand_over(member.row, member, recorded)
        return None

    def waits_until(self, member: Member) -> float:
        """See `MemberSource`."""
        return self._deadline.at

    def begin(self, member: Member) -> AgentRun:
        """See `MemberSource`."""
        return self._runs.new_run(member, self, self._deadline)

    async def end_unstarted(self, member: Member) -> None:
        """See `MemberSource`."""
        whole = self._whole(Ended(member.row, member, unstarted(member, self._deadline)))
        settle = partial(self._settle, whole, self._runs.containment, self._deadline)
        # The reward of a group is not to hold up the admission of others.
        if len(whole) < 2 or not self._runs.conclude_soon(settle):
            await settle()

    async def end(self, run: AgentRun, trajectory: Trajectory) -> None:
        """See `MemberHome`."""
        whole = self._whole(Ended(run.member.row, run.member, trajectory))
        await self._settle(whole, run.containment, run.batch_deadline)

    def _whole(self, ended: Ended) -> list[Ended]:
        """What is to be settled now that this member has ended.

        It alone; where there is a reward of groups, nothing until its group is whole.
        """
        return [ended] if self._groups is None else self._groups.add(ended)

    async def _settle(
        self, whole: Sequence[Ended], containment: Containment, deadline: Deadline
    ) -> None:
        """Reward a group that is whole, and deliver its members."""
        if whole and self._groups is not None:
            await self._rewarding.reward_group(whole, containment, deadline)
        # Of a group whose reward was asked for once, all or nothing is in the journal.
        with self._together():
            for _, member, trajectory in whole:
                self._finish(member, trajectory)
        if self._events.is_on:
            self._tell(whole)
        for row, member, trajectory in whole:
            await self._hand_over(row, member, trajectory)

    def _together(self) -> AbstractContextManager[None]:
        """What ends in the block is in the journal as a whole, or not at all."""
        if self._journal is None or self._groups is None:
            return nullcontext()
        return self._journal.together()

    def _finish(self, member: Member, trajectory: Trajectory, *, is_recorded: bool = False) -> None:
        """Settle the member, so that nothing can end it twice."""
        member.is_finished = True
        if trajectory.limit_source == self._deadline.source:
            self._met_deadline = True
            if self._config.on_deadline == "drop":
                trajectory.trainable = False
        if is_recorded:
            self._tally.add_calls(trajectory.metrics)
        elif member.log is not None:
            member.log.end(trajectory)
        self._tally.outcomes[trajectory.outcome] += 1
        self._bad.add(trajectory)
        if trajectory.outcome is Outcome.FAILED and self._is_over_budget():
            self.cancel(None, None, "failure_budget")

    async def _hand_over(self, row: int, member: Member, trajectory: Trajectory) -> None:
        """Deliver a trajectory, once the journal has it."""
        if self._keep is not None:
            self._unkept.append((member, trajectory))
            if len(self._unkept) == 1:  # else they are kept when the one before them is
                self._keep_written()
        elif member.log is None or await self._is_written(member.log):
            await self._deliver(row, trajectory)
        else:
            self.unwritten.append((row, trajectory))

    def _keep_written(self) -> None:
        """Keep what is written."""
        assert self._keep is not None
        while self._unkept and ((log := self._unkept[0][0].log) is None or log.is_written):
            member, trajectory = self._unkept.popleft()
            self._keep(member.row, trajectory)

    async def _keep_all(self) -> None:
        """Keep what is left, as far as it can be written: nothing more of this call is to come."""
        if self._unkept and self._journal is not None:
            self._journal.hurry()
        while self._unkept:
            member, trajectory = self._unkept[0]
            if member.log is None or await self._is_written(member.log):
                self._keep_written()
            else:
                self._unkept.popleft()
                self.unwritten.append((member.row, trajectory))

    async def _is_written(self, log: TrajectoryLog) -> bool:
        """Whether the journal has it; waits for that until the batch's time is over."""
        is_written = await log.until_written(self._deadline.at, lambda: self._is_closed)
        if not is_written:
            self._unwritten_error = log.failure
        return is_written

    def _tell(self, whole: Sequence[Ended]) -> None:
        for ended in whole:
            group = ended.member.identity.group
            tell_ended(self._events, ended.member, ended.trajectory)
            if not self._left_of_group:  # nobody asks for groups
                continue
            self._of_group[group].append(ended)
            self._left_of_group[group] -= 1
            if not self._left_of_group[group]:
                tell_group_ended(self._events, sorted(self._of_group.pop(group)))

    def _is_over_budget(self) -> bool:
        return self._bad.are_too_many(len(self.members), self._config)

    def _final_error(self) -> RolloutError | None:
        """The error that a finished batch ends with, if any."""
        if self._unwritten_error is not None:
            return self._unwritten_error
        if self._is_closed:
            return RolloutError(CLOSED_MEANWHILE)
        if self._is_over_budget():
            return self._bad.error(len(self.members), self._config)
        if self._met_deadline and self._config.on_deadline == "raise":
            return self._deadline.error()
        return None


def _by_priority(members: Sequence[Member]) -> Sequence[Member]:
    """The members, those of the highest priority first, else in their order."""
    if all(member.prompt.priority == members[0].prompt.priority for member in members):
        return members
    return sorted(members, key=lambda member: -member.prompt.priority)
