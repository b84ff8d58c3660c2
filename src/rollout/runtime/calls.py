"""The calls of a runtime: which are open, which step each is, and what groups they want."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from rollout.chat.group import Group
from rollout.errors import EngineError, PromptError, RolloutError
from rollout.limits import NEVER, Deadline
from rollout.scheduling.batch_run import BatchRun
from rollout.scheduling.call_arguments import check_group_call
from rollout.scheduling.group_book import GroupBook, Wanted
from rollout.scheduling.group_run import GroupRun
from rollout.scheduling.member_runs import CLOSED_MEANWHILE
from rollout.scheduling.prompt_source import check_source
from rollout.scheduling.selection import acceptance
from rollout.scheduling.staleness import StalenessBound
from rollout.scheduling.streamed_run import StreamedRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.config import RolloutConfig
    from rollout.engine.driver.pool import EnginePool
    from rollout.observe.tally import Tally
    from rollout.scheduling.group_desk import GroupDesk
    from rollout.scheduling.pulled_group import GroupMember


Call: TypeAlias = BatchRun | StreamedRun | GroupRun

logger = logging.getLogger("rollout")


class GroupStream(AsyncIterator[Group]):
    """Accepted groups as they finish; ends where there will be no more."""

    def __init__(self, run: GroupRun) -> None:
        self._run = run

    async def receive(self) -> Group | None:
        """The next accepted group; None where there will be none.

        Raises:
            PromptError, LimitExceeded, RolloutError: As `RolloutRuntime.collect`.
        """
        return await self._run.next_group()

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
        return self._run.metrics()


class GroupCalls:
    """Makes the calls of groups of a runtime."""

    def __init__(
        self, desk: GroupDesk, config: RolloutConfig, tally: Tally, engines: EnginePool
    ) -> None:
        self._config, self._desk, self._tally = config, desk, tally
        self._engines = engines

    @property
    def carried(self) -> list[GroupMember]:
        """Members that wait for the next call, which none has taken on."""
        return [each for each in self._desk.live if each.is_held and each.group.call is None]

    def make_run(
        self,
        source: Any,
        policy: Any,
        step: int,
        *,
        groups: Any = 1,
        is_stream: bool = False,
        max_staleness: Any = None,
        groups_per_step: Any = None,
    ) -> GroupRun:
        """The run of a call; one that is a stream has as many groups as its consumer takes.

        Raises:
            PromptError: An argument is wrong; nothing has been started.
            ConfigError: What the policy names cannot be imported, or the weights that a journal
                resumes with were not announced.
        """
        self._desk.log.check_announced()
        check_source(source)
        check_group_call(policy, groups, max_staleness, groups_per_step)
        scheduling = self._config.scheduling
        policy = scheduling.groups if policy is None else policy.over(scheduling.groups)
        samples = scheduling.samples_per_prompt
        if policy.members is not None and policy.members > samples:
            raise PromptError(
                f"policy.members = {policy.members}: expected at most "
                f"scheduling.samples_per_prompt = {samples}"
            )
        accept = acceptance(policy.accept)
        wanted = Wanted(
            groups=None if is_stream else int(groups),
            members=policy.members or samples,
            oversample=policy.oversample,
            max_refused=policy.max_refused,
            surplus=policy.surplus,
            on_group_deadline=policy.on_group_deadline,
            refills=scheduling.max_retries if policy.refill_failed else 0,
        )
        bound = None
        if max_staleness is not None and groups_per_step is not None:
            most, per_step = int(max_staleness), int(groups_per_step)  # NumPy's could overflow
            bound = StalenessBound(most=most, per_step=per_step, start=self._engines.weight_version)
        deadline = NEVER
        if not is_stream:
            deadline = Deadline.after(self._config.limits.batch_s, "limits.batch_s")
        prompts, missing = self._desk.source_for(self._desk.source_of(source), step)
        book = GroupBook(wanted, bound, lambda: self._engines.weight_version)
        book.counts["dropped"] = missing
        return GroupRun(
            self._desk,
            prompts,
            book,
            accept=accept,
            step=step,
            group_s=policy.group_s,
            deadline=deadline,
            config=scheduling,
            tally=self._tally,
        )


class OpenCalls(dict[BatchRun | GroupRun, Call]):
    """What runs for each call, and the call itself, which is what closing the runtime ends."""

    def __init__(self) -> None:
        super().__init__()
        self._is_closing = False
        self._idle = anyio.Event()

    @contextmanager
    def running(self, run: BatchRun | GroupRun, call: Call) -> Iterator[None]:
        """The call runs in the block; one that begins while they are being closed ends at once."""
        self[run] = call
        if self._is_closing:
            call.close()
        try:
            yield
        finally:
            del self[run]
            if not self:
                self._idle.set()

    async def close(self) -> None:
        """End the calls, which are other tasks', and wait until none is left."""
        self._is_closing = True
        while self:
            self._idle = anyio.Event()
            for call in self.values():
                call.close()
            await self._idle.wait()


class StepCount:
    """Numbers the calls that name no step."""

    def __init__(self) -> None:
        self._next = 0

    @contextmanager
    def counted(self, step: int | None) -> Iterator[int]:
        """The step of a call: its number, where it has none; one that is refused does not count."""
        if step is not None:
            yield step
            return
        number = self._next
        self._next += 1
        try:
            yield number
        except RolloutError:
            if self._next == number + 1:
                self._next = number
            raise


#: Between batches a trainer needs all of the memory, and gives new weights as a rule.
LEVEL = 2


class SleepBetweenBatches:
    """Wakes the engines for the first batch, and puts them to sleep after the last that runs.

    Attributes:
        is_over: Whether they are being closed, and need not be put to sleep any more.
    """

    def __init__(self, engines: EnginePool, *, is_wanted: bool) -> None:
        self.is_over = False
        self._engines = engines
        self._is_wanted = is_wanted
        self._batches = 0

    async def begin(self) -> None:
        """Put them to sleep until there is a batch."""
        if self._is_wanted:
            await self._engines.sleep(LEVEL)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """They are awake for a batch.

        Raises:
            RolloutError: The runtime was closed meanwhile.
        """
        if not self._is_wanted:
            yield
            return
        self._batches += 1
        try:
            await self._engines.wake_up()
            if self.is_over:
                raise RolloutError(CLOSED_MEANWHILE)
            yield
        finally:
            self._batches -= 1
            if not self._batches and not self.is_over:
                with anyio.CancelScope(shield=True):  # bounded: the pool limits each replica
                    await self._put_to_sleep()

    async def _put_to_sleep(self) -> None:
        """A batch that is done is not lost because engines do not fall asleep after it."""
        try:
            await self._engines.sleep(LEVEL)
        except EngineError as error:
            logger.warning("the engines stay awake: %s", error)


def number_rows(groups: Sequence[Group]) -> list[Trajectory]:
    """The trajectories of a batch of these groups, numbered by their places in it.

    They are the batch's own: a group may stand in other batches too, at other places.
    """
    rows = []
    for place, group in enumerate(groups):
        for trajectory in map(copy, group.trajectories):
            trajectory.group = place
            rows.append(trajectory)
    return rows
