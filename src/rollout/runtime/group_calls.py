"""The calls of a runtime that take groups of their own choice: `collect` and `stream_groups`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs

from rollout.chat.group import Group
from rollout.config import GroupPolicy
from rollout.errors import PromptError
from rollout.holds import NEVER
from rollout.limits import Deadline
from rollout.scheduling.call_arguments import check_group_call
from rollout.scheduling.group_book import GroupBook, Wanted
from rollout.scheduling.group_run import GroupRun
from rollout.scheduling.prompt_source import PromptSource, check_source
from rollout.scheduling.selection import Accept, acceptance
from rollout.scheduling.staleness import StalenessBound

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rollout.config import RolloutConfig
    from rollout.engine.driver.pool import EnginePool
    from rollout.observe.tally import Tally
    from rollout.scheduling.group_desk import GroupDesk
    from rollout.scheduling.pulled_group import GroupMember


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


@attrs.frozen(kw_only=True)
class CheckedCall:
    """What a caller asked for, checked."""

    source: PromptSource
    policy: GroupPolicy
    accept: Accept | None


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

    def _version(self) -> int:
        return self._engines.weight_version

    def checked(
        self,
        source: Any,
        policy: Any,
        *,
        groups: Any = 1,
        max_staleness: Any = None,
        groups_per_step: Any = None,
    ) -> CheckedCall:
        """What a call was given.

        Raises:
            PromptError: An argument is wrong; nothing has been started.
            ConfigError: What the policy names cannot be imported, or the weights that a journal
                resumes with were not announced.
        """
        self._desk.log.check_announced()
        check_source(source)
        check_group_call(policy, groups, max_staleness, groups_per_step)
        base = self._config.scheduling.groups
        whole = base if policy is None else policy.over(base)
        samples = self._config.scheduling.samples_per_prompt
        if whole.members is not None and whole.members > samples:
            raise PromptError(
                f"policy.members = {whole.members}: expected at most "
                f"scheduling.samples_per_prompt = {samples}"
            )
        accept = acceptance(whole.accept)
        return CheckedCall(source=self._desk.source_of(source), policy=whole, accept=accept)

    def run_of(
        self,
        call: CheckedCall,
        step: int,
        groups: int | None,
        max_staleness: int | None = None,
        groups_per_step: int | None = None,
    ) -> GroupRun:
        """The run of a call."""
        scheduling, policy = self._config.scheduling, call.policy
        wanted = Wanted(
            groups=groups,
            members=policy.members or scheduling.samples_per_prompt,
            oversample=policy.oversample,
            max_refused=policy.max_refused,
            surplus=policy.surplus,
            on_group_deadline=policy.on_group_deadline,
            refills=scheduling.max_retries if policy.refill_failed else 0,
        )
        bound = None
        if max_staleness is not None and groups_per_step is not None:
            start = self._version()
            most, per_step = int(max_staleness), int(groups_per_step)  # NumPy's could overflow
            bound = StalenessBound(most=most, per_step=per_step, start=start)
        deadline = NEVER
        if groups is not None:
            deadline = Deadline.after(self._config.limits.batch_s, "limits.batch_s")
        source, missing = self._desk.source_for(call.source, step)
        book = GroupBook(wanted, bound, self._version)
        book.counts["dropped"] = missing
        return GroupRun(
            self._desk,
            source,
            book,
            accept=call.accept,
            step=step,
            group_s=policy.group_s,
            deadline=deadline,
            config=scheduling,
            tally=self._tally,
        )

    def stream_of(self, run: GroupRun) -> GroupStream:
        """What its consumer iterates over."""
        return GroupStream(run)

    def cancel(self, uid: str | None, member: int | None, reason: str) -> int:
        """Cancel carried members; see `GroupDesk.cancel`."""
        return self._desk.cancel(uid, member, reason)

    async def discard_carried(self) -> int:
        """See `GroupingRuntime.discard_carried`."""
        return await self._desk.discard_carried()

    def weights_changed(self) -> None:
        """There is room for more groups where their weights must not be old."""
        self._desk.tell()

    async def close(self) -> None:
        """End what is kept; no call is left."""
        await self._desk.close()

    @asynccontextmanager
    async def running(
        self, run: GroupRun, serve: Callable[[], Coroutine[Any, Any, object]]
    ) -> AsyncIterator[None]:
        """It runs in the block; after it, nothing of it does but what is carried.

        Args:
            serve: Its life, in a task of the runtime's.
        """
        await self._desk.open(run, serve)
        try:
            yield
        finally:
            await run.leave()
            self._desk.left(run)
            run.change()  # a task that still waits for a group learns that there is none
