"""What the calls of a runtime share: slots and tasks of members, queued groups, rewards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio

from rollout.scheduling.endings import CLOSED
from rollout.scheduling.group_queue import GroupQueue
from rollout.scheduling.member_group import Stage, cancel_members
from rollout.scheduling.member_runs import MemberRuns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rollout.config import RolloutConfig
    from rollout.scheduling.member_group import Ended, MemberGroup
    from rollout.scheduling.run_log import RunLog
    from rollout.scheduling.trajectory import TrajectoryRunner
    from rollout.worker_threads import WorkerThreads

#: Reasons of carried members that do not continue: the caller wants none; its tokens are too old.
DISCARDED, STALE = "discarded", "stale"


class OpenCalls(dict[Any, None]):
    """The calls that run; closing the runtime ends them."""

    def __init__(self) -> None:
        super().__init__()
        self._is_closing = False
        self._idle = anyio.Event()

    @contextmanager
    def running(self, call: Any) -> Iterator[None]:
        """Count a call as running during the block; while calls are closed, it ends at once."""
        self[call] = None
        if self._is_closing:
            call.close()
        try:
            yield
        finally:
            del self[call]
            if not self:
                self._idle.set()

    async def close(self) -> None:
        """End the calls, which are other tasks', and wait until none is left."""
        self._is_closing = True
        while self:
            self._idle = anyio.Event()
            for call in tuple(self):
                call.close()
            await self._idle.wait()


class Scheduler:
    """What the calls of one runtime share.

    Args:
        limiter: Bounds the trajectories in flight.
        start: Starts a task of the runtime's.

    Attributes:
        start: That.
        runs: The slots and tasks of members.
        queue: Groups that no call has.
        calls: Those that are open.
        log: The journal.
        rewards_groups: Whether groups have a reward.
    """

    def __init__(
        self,
        config: RolloutConfig,
        runner: TrajectoryRunner,
        threads: WorkerThreads,
        run_seed: int,
        limiter: anyio.CapacityLimiter,
        start: Callable[..., object],
        log: RunLog,
    ) -> None:
        services = runner.services
        self.config, self.engines, self.log = config, services.engines, log
        self.events, self.tally, self.start = services.events, services.tally, start
        self.rewards_groups = runner.rewarding.functions.group is not None
        self.calls = OpenCalls()
        self.runs = MemberRuns(runner, limiter, start, log)
        self.queue = GroupQueue(
            log,
            threads,
            services.containment,
            services.tally,
            start,
            run_seed=run_seed,
            samples=config.scheduling.samples_per_prompt,
        )
        self._rewarding = runner.rewarding

    def notify(self) -> None:
        """Something has changed for all calls, such as the weights' version."""
        for call in tuple(self.calls):
            call.change()

    async def close(self) -> None:
        """End what is carried; no call is left. Shielded by the caller."""
        await self.discard_carried(CLOSED)

    def wants_reward(self, group: MemberGroup, ended: Sequence[Ended]) -> bool:
        """Whether `group_reward` is still to be called for these members."""
        if group.stage >= Stage.REWARDED or not self.rewards_groups:
            return False
        return not self.log.is_rewarded(ended)

    async def reward(self, group: MemberGroup, ended: Sequence[Ended]) -> None:
        """Have a group rewarded; cancelled meanwhile, that may be repeated."""
        await self._rewarding.reward_group(ended)
        group.stage = Stage.REWARDED

    # Carried members.

    def drop_carried(self, group: MemberGroup) -> None:
        """End the carried members of a group whose prompt begins again."""
        cancel_members([each for each in group.waiting if each.is_carried], STALE)

    def cancel(self, uid: str | None, member: int | None, reason: str) -> int:
        """Cancel the carried members that match; they stay in their groups. How many there are."""
        waiting = [each for group in self.queue.leftovers for each in group.waiting]
        chosen = [each for each in waiting if each.is_carried and each.can_cancel(uid, member)]
        cancel_members(chosen, reason)
        return len(chosen)

    async def discard_carried(self, reason: str = DISCARDED) -> int:
        """End every carried member, and drop its group; how many there were."""
        leftovers = self.queue.leftovers
        groups = [group for group in leftovers if group.is_carried]
        leftovers[:] = [group for group in leftovers if not group.is_carried]
        if reason == DISCARDED:
            for group in groups:
                self.log.note_dropped(group)
        waiting = [member for group in groups for member in group.waiting]
        carried = [each for each in waiting if each.is_carried and not each.is_finished]
        cancel_members(carried, reason)
        await self.runs.wait_until_finished(carried)
        return len(carried)
