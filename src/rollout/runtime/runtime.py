"""The runtime: engines, tools and threads of a rollout, owned by one scope."""

from __future__ import annotations

import logging
from collections.abc import Sized
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
import attrs

from rollout.bridge import loop_clock
from rollout.engine.core import ALL_TAGS
from rollout.errors import RolloutError
from rollout.journal.call_log import CallLog
from rollout.limits import Deadline
from rollout.observe.loop_lag import LoopLag
from rollout.runtime.collation import Collation, attach
from rollout.runtime.explain import explain
from rollout.runtime.measuring import BatchWatch, BatchWindow, RuntimeStatistics
from rollout.runtime.steps import SleepBetweenBatches, StepCount, number_rows
from rollout.scheduling.admission import Admission, Progress
from rollout.scheduling.arguments import (
    check_call,
    check_groups,
    check_names,
    check_prompts,
    check_target,
)
from rollout.scheduling.list_calls import ListCall
from rollout.scheduling.members import MemberGroup
from rollout.scheduling.run_log import RunLog
from rollout.scheduling.scheduler import Scheduler
from rollout.scheduling.source_calls import GroupStream, SourceCall
from rollout.scopes import open_task_group
from rollout.types import name_prompt
from rollout.worker_threads import may_leave_loop, run_in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from anyio.abc import TaskGroup
    from anyio.streams.memory import MemoryObjectReceiveStream

    from rollout.batch import RolloutBatch
    from rollout.chat import ChatTemplate
    from rollout.chat.trajectory import Group, Trajectory
    from rollout.config import GroupPolicy
    from rollout.engine.pool.pool import EnginePool
    from rollout.engine.weights import UpdateMode, WeightSource
    from rollout.journal.journal import Journal
    from rollout.observe.explanation import Explanation
    from rollout.scheduling.sources import Source
    from rollout.scheduling.trajectory import TrajectoryRunner
    from rollout.tensor_layout import Layout, Trim
    from rollout.types import Prompt

#: More members than these are made in a thread: so many take a millisecond or two.
MANY_MEMBERS = 500

logger = logging.getLogger("rollout")


class RolloutRuntime:
    """Runs batches of trajectories on its engines; made by `open_rollout`.

    Several `generate` and `stream` calls may run at once; they share engines, threads and
    `scheduling.max_in_flight`.

    Attributes:
        config: What it was opened with.
        services: What its trajectories share, for what is built on a runtime.
        admission: `pause` and `resume` keep trajectories that have not started waiting.
    """

    def __init__(self, runner: TrajectoryRunner, run_seed: int, journal: Journal | None) -> None:
        self._runner, self._run_seed, self._journal = runner, run_seed, journal
        self.services = services = runner.services
        self.config = config = services.config
        self.admission = Admission(
            config.scheduling.max_in_flight, is_adaptive=config.scheduling.adaptive_admission
        )
        self._sleep = SleepBetweenBatches(
            services.engines, is_wanted=config.engine.sleep_between_batches
        )
        self._collation = Collation(services)
        self._lag = LoopLag(services.events)
        self._watch = BatchWatch(services, self._lag)
        self._steps, self._clock = StepCount(), loop_clock()
        self._scheduler = Scheduler(
            runner,
            run_seed,
            self.admission,
            lambda *job, name=None: self._tasks.start_soon(*job, name=name),  # no group yet
            RunLog() if journal is None else CallLog(journal),
        )
        self._tasks: TaskGroup
        self._is_closing = False

    @property
    def template(self) -> ChatTemplate:
        """The model's tokenizer and chat format."""
        return self.services.template

    @property
    def engines(self) -> EnginePool:
        """The engines: replicas can be added, removed and drained there while calls run."""
        return self.services.engines

    async def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int | None = None,
        step: int | None = None,
        validate: bool = False,
        layout: Layout = "padded",
        trim: Trim = False,
    ) -> RolloutBatch:
        """Run every member of every prompt; rows in the order of the prompts, members adjacent.

        Cancellation ends every member and passes through; the runtime stays usable. To stop
        early and keep what there is, call `cancel`.

        Args:
            prompts: What the groups start from.
            samples: Members of each group; None: ``scheduling.samples_per_prompt`` of them, or
                ``scheduling.validation_samples_per_prompt`` where it validates.
            step: The trainer's step, 0 … 2**63 - 1: part of every seed. None counts the calls.
            validate: Sample as `validation_sampling` says.
            layout, trim: Of the tensors; see `rollout.batch.collate`.

        Raises:
            PromptError: The prompts or another argument are unusable; nothing has been started.
            LimitExceeded: More members failed than `scheduling.max_failures` allows, or
                `scheduling.on_deadline` is "raise" and the time is over.
            RolloutError: The runtime was closed meanwhile.

        Errors after the start carry what there was as `partial`.
        """
        call = await self._make_call("generate", prompts, samples, step, validate, layout, trim)
        with self._watched(call, validate) as window:
            try:
                async with self._sleep.awake(), call.running():
                    await call.receive_batch()
            except Exception as error:
                rows = call.list_trajectories()
                attach(error, await self._collation.batch(rows, window, layout, trim))
                raise
            rows = call.list_trajectories()
            try:
                batch = await self._collation.batch(rows, window, layout, trim)
            except Exception as error:  # too little memory, say, which less may have room in
                with suppress(Exception):
                    attach(error, await self._collation.batch(rows, window, "packed"))
                raise
        self._scheduler.log.note_delivery(call.members)
        return batch

    @asynccontextmanager
    async def stream(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int | None = None,
        step: int | None = None,
        validate: bool = False,
    ) -> AsyncIterator[MemoryObjectReceiveStream[Trajectory]]:
        """Trajectories as they end, in the order in which they do; leaving cancels the rest.

        For a slow consumer as many wait as may run; then the admission of members slows down.

        Raises:
            PromptError: The prompts or another argument are unusable; nothing has been started.
            LimitExceeded: As `generate`, at the end of the block, when all have been received.
            RolloutError: The runtime was closed meanwhile.

        The `partial` of an error holds the trajectories that had ended, but for those that were
        received and are not referenced any more.
        """
        call = await self._make_call("stream", prompts, samples, step, validate)
        was_left = False
        with self._watched(call, validate) as window:
            async with self._sleep.awake():
                try:
                    async with call.running():
                        yield call.received
                        was_left = not (call.has_ended.is_set() or call.is_closed)
                except anyio.ClosedResourceError:
                    if not call.is_closed:
                        raise  # else its receiver was closed with the runtime
            error = None if was_left else call.find_error()
            if error is not None:
                rows = call.list_trajectories()
                attach(error, await self._collation.batch(rows, window))
                raise error

    async def collect(
        self,
        source: Source,
        groups: int,
        *,
        policy: GroupPolicy | None = None,
        step: int | None = None,
        layout: Layout = "padded",
        trim: Trim = False,
    ) -> RolloutBatch:
        """So many accepted groups, in the order in which their prompts were pulled.

        Rows of a group are adjacent, in member order. The source is pulled only as places come
        free and is left where it was, for the next call with it. What was pulled and not used stays
        with the runtime and comes first in its next call, whatever the source of that is.
        Cancellation leaves it there too, and passes through.

        Args:
            source: Any iterable or async iterable of `Prompt`, endless ones too, or what has them
                by number, as map-style datasets do. It may block: it is asked in a thread, unless
                it is a list or a tuple. An async one is always asked in the same task; an async
                generator is closed there, with the runtime at the latest.
            groups: How many. With ``on_group_deadline = "drop"`` those left out are missing, and
                so are others once `cancel` was called for all.
            policy: Stands over ``scheduling.groups`` of the configuration.
            step: As for `generate`.
            layout, trim: Of the tensors; see `rollout.batch.collate`.

        Returns:
            The batch; its metrics ``groups/…`` and ``selection/…`` say what was not taken.

        Raises:
            PromptError: An argument is wrong, and nothing was started; or the source gave what is
                no prompt, or `accept` returned no bool.
            SourceEnded: The source has no more prompts. The next call begins it again.
            LimitExceeded: More groups were refused than ``max_refused``, more members failed than
                `scheduling.max_failures`, or `limits.batch_s` is over.
            JournalError: What it gives cannot be written, and `limits.batch_s` is over.
            RolloutError: The runtime was closed meanwhile.

        What the source or `accept` raises leaves as itself. Errors after the start carry the
        groups that there were as `partial`; those count as used.
        """
        self._refuse_calls()
        step, _ = check_call(step, validate=False, samples=None, layout=layout, trim=trim)
        with self._steps.counted(step) as step:
            call = SourceCall(
                self._scheduler, source, policy, name="collect", step=step, groups=groups
            )
        with self._watch.window("collect", step, prompts=int(groups)) as window:
            call.number = window.batch
            found: list[MemberGroup] = []
            try:
                async with self._sleep.awake(), call.running():
                    while (group := await call.take()) is not None:
                        found.append(group)
                call.note_accepted(found)
                found.sort(key=lambda group: group.number)
                rows = number_rows([each.result for each in found if each.result is not None])
                error, metrics = call.find_error(len(found)), call.metrics()
                batch = await self._collation.batch(rows, window, layout, trim, extra=metrics)
            except BaseException:  # cancelled, or no room for tensors: nobody has them
                call.take_back(found)
                self._scheduler.log.return_call(call.key)
                raise
            missing = groups - len(found) if error is None else 0
            failure = await call.record(found, missing)
            if len(found) < groups:
                call.note_source_end()
            error = error or failure
            if error is None:
                return batch
            attach(error, batch)
            raise error

    @asynccontextmanager
    async def stream_groups(
        self,
        source: Source,
        *,
        policy: GroupPolicy | None = None,
        step: int | None = None,
        max_staleness: int | None = None,
        groups_per_step: int | None = None,
    ) -> AsyncIterator[GroupStream]:
        """Accepted groups as they finish; leaving cancels or carries the rest, as the policy says.

        A slow consumer holds the admission of further groups back. Groups that finished and were
        not taken stay with the runtime, like prompts: see `collect`.

        Args:
            source, policy: As for `collect`; `oversample` has no meaning here.
            step: As for `generate`; one for the whole stream.
            max_staleness: By how many versions the weights may be newer, when a group is taken,
                than those that sampled its first token. Admission is withheld, and groups that
                are due are given out first, so that this holds while `update_weights` raises the
                version by one for each `groups_per_step` groups taken. Carried groups for which it
                cannot hold begin again. None does not bound it.
            groups_per_step: How many groups the consumer takes for each version.

        Raises:
            PromptError, LimitExceeded, RolloutError: As `collect`, from the iterator.
        """
        self._refuse_calls()
        step, _ = check_call(step, validate=False, samples=None)
        with self._steps.counted(step) as step:
            call = SourceCall(
                self._scheduler,
                source,
                policy,
                name="stream_groups",
                step=step,
                max_staleness=max_staleness,
                groups_per_step=groups_per_step,
            )
        with self._watch.window("stream_groups", step) as window:
            call.number = window.batch
            async with self._sleep.awake(), call.running():
                yield GroupStream(call)

    async def make_batch(
        self, groups: Sequence[Group], *, layout: Layout = "padded", trim: Trim = False
    ) -> RolloutBatch:
        """The tensors of groups that `stream_groups` gave; rows of a group adjacent, in this order.

        Its metrics say nothing of time (`batch_s`, `throughput/…`): each group had its own.

        Args:
            layout, trim: See `rollout.batch.collate`.

        Raises:
            PromptError: An argument is wrong.
        """
        check_groups(groups, layout, trim)
        window = BatchWindow(self.engines)
        return await self._collation.batch(number_rows(groups), window, layout, trim)

    async def discard_carried(self) -> int:
        """End carried trajectories as `cancelled`; how many there were.

        Their groups are dropped with all that they had. Prompts that were pulled and never
        started stay, and so do trajectories that wait in a call which is open: `cancel` them.
        """
        return await self._scheduler.discard_carried()

    def cancel(
        self, uid: str | None = None, member: int | None = None, *, reason: str = "cancelled"
    ) -> int:
        """End trajectories with outcome `cancelled` and keep their tokens; `generate` returns.

        Carried ones end too, and stand so in their groups when the next call has these.

        Args:
            uid: Only those of this prompt; None: of every prompt.
            member: Only this member; None: every one.
            reason: Becomes the trajectories' `reason`.

        Returns:
            How many were cancelled.

        Raises:
            PromptError: An argument is none; nothing has been cancelled.
        """
        check_target(uid, member, reason)
        running: int = sum([call.cancel(uid, member, reason) for call in self._scheduler.calls])
        return running + self._scheduler.cancel(uid, member, reason)

    async def update_weights(
        self, *, version: int, source: WeightSource, mode: UpdateMode = "abort_and_resume"
    ) -> None:
        """Every engine has these weights afterwards; see `EnginePool.update_weights`.

        Args:
            version: What tokens sampled with them are stamped with, in `weight_versions`.
            mode: What becomes of generations under way: "wait", "abort_and_resume" or "in_place".

        Raises:
            EngineError: An argument is wrong, or no engine could load them; all keep the weights
                that they have.
            RolloutError: The runtime is closed.
        """
        self._refuse_when_closed()
        await self.engines.update_weights(version, source, mode)
        self._scheduler.change()  # there is room for groups whose weights must not be old
        if self._journal is not None:
            self._journal.note_version(int(version))

    async def sleep(self, level: int = 1) -> None:
        """The engines have released memory afterwards; see `EnginePool.sleep`.

        Trajectories stay as they are; those that generate wait until `wake_up`.

        Args:
            level: 1 releases the KV cache, 2 the weights as well.
        """
        await self.engines.sleep(level)

    async def wake_up(self, tags: Iterable[str] = ALL_TAGS) -> None:
        """The engines have taken memory back afterwards; see `EnginePool.wake_up`.

        Args:
            tags: "weights", "kv_cache", or both.
        """
        await self.engines.wake_up(tags)

    async def flush_cache(self) -> None:
        """The engines have forgotten what they computed so far; see `EnginePool.flush_cache`."""
        await self.engines.flush_cache()

    def statistics(self) -> RuntimeStatistics:
        """A snapshot."""
        services, tally, lag = self.services, self.services.tally, self._lag.total
        replicas = self.engines.statistics()
        return RuntimeStatistics(
            admitted=tally.admitted,
            running=tally.running,
            carried=tally.carried,
            finished=tally.finished,
            outcomes={outcome.value: n for outcome, n in tally.outcomes.items() if n},
            generated_tokens=tally.generated_tokens + self.engines.tokens_under_way,
            tool_calls=tally.tool_calls,
            replicas=replicas,
            zombies=sum(replica.zombies for replica in replicas),
            recoveries=attrs.evolve(self.engines.recoveries),
            unresponsive=tally.unresponsive,
            abandoned_threads=services.threads.abandoned
            | services.texts.abandoned
            | services.media.abandoned,
            max_running=self.admission.allowed,
            loop_lag_s=lag.blocked_s or 0.0,
            loop_starved_s=lag.starved_s or 0.0,
            journal=None if self._journal is None else self._journal.statistics(),
            sandboxes=services.sandboxes.statistics(),
        )

    def explain(self) -> Explanation:
        """What each trajectory that has not ended waits for, and since when; print it.

        Waits for nothing, and may be called from a signal handler of the loop's thread, also while
        something blocks the loop.
        """
        calls, carried = tuple(self._scheduler.calls), self._scheduler.carried
        blocked_s = self._lag.blocked_now_s
        return explain(self.services.engines, self._clock(), calls, carried, blocked_s)

    @contextmanager
    def _watched(self, call: ListCall, validate: bool) -> Iterator[BatchWindow]:
        prompts, members = call.groups.wanted, len(call.members)
        with self._watch.window(
            call.name, call.step, validate=validate, prompts=prompts or 0, trajectories=members
        ) as window:
            call.number = window.batch
            yield window

    async def _make_call(
        self,
        name: str,
        prompts: Sequence[Prompt],
        samples: int | None,
        step: int | None,
        validate: bool,
        layout: Layout = "padded",
        trim: Trim = False,
    ) -> ListCall:
        """A call of a list whose arguments are good."""
        self._refuse_calls()
        step, samples = check_call(step, validate, samples, layout, trim)
        deadline = Deadline.after(self.config.limits.batch_s, "limits.batch_s")
        samples = samples or self.config.scheduling.samples_of(validate=validate)
        is_long = isinstance(prompts, Sized) and len(prompts) * samples > MANY_MEMBERS
        with self._steps.counted(step) as step:
            make = partial(self._make_groups, prompts, samples, step, validate)
            batch, enrol = await run_in_thread(make) if is_long else make()
            self._refuse_when_closed()
            enrol()
        return ListCall(self._scheduler, batch, samples, name=name, step=step, deadline=deadline)

    def _make_groups(
        self, prompts: Sequence[Prompt], samples: int, step: int, validate: bool
    ) -> tuple[list[MemberGroup], Callable[[], None]]:
        """Those of a call, whose prompts are good; and what gives their members logs."""
        uids, services = check_prompts(prompts), self.services
        check_names(prompts, self.config.agent, services.tools.names, services.interactions)
        groups = []
        for number, (prompt, uid) in enumerate(zip(prompts, uids, strict=True)):
            groups.append(group := MemberGroup(number, name_prompt(prompt, uid)))
            group.add_members(samples, step=step, run_seed=self._run_seed, validate=validate)
        members = [member for group in groups for member in group.waiting]
        return groups, self._scheduler.log.enrol_batch(members)

    def _refuse_calls(self) -> None:
        """Raise where no call may begin now."""
        self._refuse_when_closed()
        if self._journal is not None:
            self._journal.check_announced()

    def _refuse_when_closed(self) -> None:
        if self._is_closing:
            raise RolloutError("the runtime is closed")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Watch the loop and the engines' load; at the end no call is left."""
        tally = self.services.tally
        async with open_task_group() as self._tasks:
            self._tasks.start_soon(self._watch.sample)
            if may_leave_loop():
                self._tasks.start_soon(self._lag.watch)
            self._tasks.start_soon(
                self.admission.adapt,
                self.services.engines.loads,
                lambda: Progress(tally.finished, tally.known_tokens, tally.reused_tokens),
            )
            try:
                await self._sleep.begin()
                yield
            finally:
                self._is_closing = self._sleep.is_over = True
                with anyio.CancelScope(shield=True):  # until the calls use the engines no more
                    await self._scheduler.close()
                    self.engines.refuse_requests()  # of code that has shielded itself
