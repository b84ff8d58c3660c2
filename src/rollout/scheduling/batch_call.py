"""A call of `generate` or `stream`: all groups of a list, handed over member by member."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import anyio

from rollout.agents.identity import Identity, named
from rollout.chat.trajectory import Trajectory
from rollout.scheduling.calls import Call
from rollout.scheduling.endings import CLOSED
from rollout.scheduling.groups import Groups, Wanted
from rollout.scheduling.member_group import GroupMember, MemberGroup
from rollout.scheduling.prompts import Ended, Member
from rollout.scopes import open_task_group
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.errors import JournalError
    from rollout.limits import Deadline
    from rollout.scheduling.scheduler import Scheduler
    from rollout.scheduling.trajectory import MemberHome
    from rollout.types import Prompt

#: Finished trajectories that wait for a slow receiver before members wait too.
STREAM_BUFFER = 16


def make_groups(
    prompts: Sequence[Prompt],
    uids: Sequence[str],
    *,
    samples: int,
    step: int,
    run_seed: int,
    validate: bool,
) -> list[MemberGroup]:
    """Make a group of `samples` members of each prompt, in the order of their rows."""
    groups = []
    for number, (prompt, uid) in enumerate(zip(prompts, uids, strict=True)):
        group = MemberGroup(number, named(prompt, uid))
        group.waiting = [
            GroupMember(
                group.prompt,
                Identity(
                    uid=uid,
                    group=number,
                    member=member,
                    step=step,
                    run_seed=run_seed,
                    validate=validate,
                ),
                row=number * samples + member,
                group=group,
            )
            for member in range(samples)
        ]
        groups.append(group)
    return groups


class BatchCall(Call):
    """A call of `generate`; its members run in tasks of its own, which end with it.

    Attributes:
        members: All of them, in the order of their rows.
        rows: The trajectory of each, once it has ended.
        has_groups: See `MemberHome`.
    """

    name = "generate"

    def __init__(
        self,
        scheduler: Scheduler,
        groups: Sequence[MemberGroup],
        *,
        step: int,
        deadline: Deadline,
    ) -> None:
        members = [member for group in groups for member in group.waiting]
        samples = len(groups[0].waiting) if groups else 1
        wanted = Groups(Wanted(groups=len(groups), members=samples))
        super().__init__(scheduler, wanted, step=step, deadline=deadline)
        self.members, self.has_groups = members, samples > 1
        self.rows: list[Trajectory | None] = [None] * len(members)
        self.runs = scheduler.new_runs()
        self.waits_for_groups = scheduler.rewards_groups
        self._unwritten: JournalError | None = None
        #: Groups whose members run again, because their reward is not known yet.
        self._unrewarded_groups = {
            member.group
            for member in members
            if self.waits_for_groups and not (member.log is not None and member.log.is_finished)
        }
        for group in sorted(groups, key=lambda group: -group.prompt.priority):
            self.groups.adopt(group)

    def unfinished(self) -> dict[Member, bool]:
        """Members without an outcome, and True for those that wait for others of their group."""
        ended = {each.member for group in self.groups.open for each in group.ended}
        return {member: member in ended for member in self.members if not member.is_finished}

    async def run(self) -> None:
        """Run every member, and hand each trajectory over once.

        Cancellation ends every member, bounded, and passes through.

        Raises:
            LimitExceeded: More members failed than `scheduling.max_failures` allows, or the time
                was over and `scheduling.on_deadline` is "raise"; every member has been delivered.
            JournalError: The journal could not be written until then.
            RolloutError: `close` was called; every member has been delivered.
        """
        self._tally.admitted += len(self.members)
        for member in self.members:
            member.batch = self.batch
        try:
            async with open_task_group() as watching:
                watching.start_soon(self._watch_deadline)
                await self.runs.run(self.admit)
        finally:
            self.scheduler.count_lost(m for m in self.members if not m.is_finished)
            self._bad.log()
        await self._flush()
        error = self._find_error()
        if error is not None:
            raise error

    def close(self) -> None:
        """Cancel every member because the runtime closes; trajectories are delivered as usual."""
        super().close()
        self.runs.cancel([m for m in self._unrewarded() if m.cancel_reason is None], CLOSED)

    async def _flush(self) -> None:
        """Wait until the journal has what is returned; no member has a slot meanwhile."""
        ended = [Ended(m.row, m, self.rows[m.row]) for m in self.members]  # type: ignore[arg-type]
        self._unwritten = await self._log.wait_written(
            ended, self.deadline.at, lambda: self.is_closed
        )

    def _find_error(self) -> BaseException | None:
        """The error that a finished batch ends with, if any."""
        if self._unwritten is not None or self.is_closed:
            return self._unwritten or self.failure
        if self._is_over_budget:
            return self._bad.error(len(self.members), self._config)
        if self._met_deadline and self._config.on_deadline == "raise":
            return self.deadline.error()
        return None

    @property
    def _is_over_budget(self) -> bool:
        return self._bad.are_too_many(len(self.members), self._config)

    @property
    def _home(self) -> tuple[MemberHome, Deadline]:
        return self, self.deadline

    def _find_recorded(self, member: GroupMember) -> Trajectory | None:
        if member.group in self._unrewarded_groups:
            return None
        return super()._find_recorded(member)

    def _note_end(self, ended: Ended, *, is_surplus: bool, is_again: bool) -> None:
        if not self.waits_for_groups:
            self._count(ended)

    def _check_failures(self, trajectory: Trajectory) -> None:
        if self._is_cancelled or trajectory.outcome is not Outcome.FAILED:
            return
        if self._is_over_budget:
            self.cancel(None, None, "failure_budget")

    async def _hand_over(self, group: MemberGroup, wanted: Sequence[Ended]) -> None:
        if self.waits_for_groups:
            for ended in wanted:
                self._count(ended)
        if self._events.tells_all:
            self._tell_group(wanted)
        self.groups.release(group)
        if self.waits_for_groups:
            for ended in wanted:
                await self._deliver(ended)

    async def _deliver(self, ended: Ended) -> None:
        """Put a trajectory into its row of the batch."""
        self.rows[ended.row] = ended.trajectory

    async def _deliver_alone(self, ended: Ended) -> None:
        if not self.waits_for_groups:
            await self._deliver(ended)


class StreamCall(BatchCall):
    """A call of `stream`, in a task of the runtime's: no scope is open around its caller's block.

    Attributes:
        received: Where its trajectories come out: `STREAM_BUFFER` wait there for a slow receiver,
            and then members wait, with their slots.
    """

    name = "stream"

    def open(self) -> None:
        """Open the memory stream of trajectories; `leave` must follow."""
        self._send, self.received = anyio.create_memory_object_stream[Trajectory](STREAM_BUFFER)
        self._scope, self._has_ended = anyio.CancelScope(), anyio.Event()
        #: Trajectories that were sent, while somebody refers to them; the others are in `rows`.
        self._sent: dict[int, weakref.ref[Trajectory]] = {}

    async def serve(self) -> None:
        """Run to the end, and note an error as `failure`; raise nothing but cancellation."""
        try:
            with self.scheduler.calls.running(self), self._scope:
                async with self._send:
                    await self.run()
        except (Exception, KeyboardInterrupt) as error:
            self.failure = error
        finally:
            self._has_ended.set()

    def close(self) -> None:
        """Cancel every member because the runtime closes; deliver no more trajectories."""
        super().close()
        self.received.close()

    async def leave(self) -> None:
        """Cancel what still runs, and wait for it; shielded."""
        if not self.is_closed:  # else it ends by itself, and keeps what there was
            self._scope.cancel()
        self.received.close()
        with anyio.CancelScope(shield=True):
            await self._has_ended.wait()

    def trajectories(self) -> list[Trajectory]:
        """Those that have ended and are still referenced, in the order of their rows."""
        found = {row: find() for row, find in self._sent.items()}
        found |= {row: each for row, each in enumerate(self.rows) if each is not None}
        return [trajectory for _, trajectory in sorted(found.items()) if trajectory is not None]

    async def _flush(self) -> None:
        """Do nothing: each trajectory was written before it was sent."""

    async def _deliver(self, ended: Ended) -> None:
        row, member, trajectory = ended
        self.rows[row] = trajectory
        unwritten = await self._log.wait_written([ended], self.deadline.at, lambda: self.is_closed)
        if unwritten is not None:
            self._unwritten = unwritten
            return
        self._sent[row] = weakref.ref(trajectory)
        try:
            await self._send.send(trajectory)
        except anyio.BrokenResourceError:  # the receiver has left
            return
        self.rows[row] = None
        if member.log is not None:
            member.log.delivered()
