"""The runtime: engines, tools and threads of a rollout, owned by one scope."""

from __future__ import annotations

import logging
from collections.abc import Sized
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from rollout.bridge import has_virtual_clock, loop_clock
from rollout.errors import RolloutError
from rollout.limits import Deadline
from rollout.observe.loop_lag import LoopLag
from rollout.runtime.batch_watch import BatchWatch
from rollout.runtime.collation import Collation
from rollout.runtime.engine_controls import EngineControls
from rollout.runtime.explaining import ExplainingRuntime
from rollout.runtime.group_calls import GroupCalls
from rollout.runtime.grouping import GroupingRuntime
from rollout.runtime.long_work import LongWork
from rollout.runtime.open_calls import OpenCalls
from rollout.runtime.sleep_between_batches import SleepBetweenBatches
from rollout.runtime.statistics import RuntimeStatistics, statistics_of
from rollout.runtime.step_count import StepCount
from rollout.scheduling.admission import Admission
from rollout.scheduling.batch_run import BatchRun
from rollout.scheduling.call_arguments import check_call, check_target
from rollout.scheduling.group_desk import GroupDesk
from rollout.scheduling.journal.group_log import GroupLog
from rollout.scheduling.member_runs import MemberRuns
from rollout.scheduling.pressure import Progress
from rollout.scheduling.prompt_names import check_names
from rollout.scheduling.prompts import check_prompts, members_of
from rollout.scheduling.streamed_run import STREAM_DROPPED, StreamedRun, TrajectoryStream
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

    from anyio.abc import TaskGroup

    from rollout.batch import RolloutBatch
    from rollout.chat import ChatTemplate
    from rollout.chat.trajectory import Trajectory
    from rollout.config import RolloutConfig
    from rollout.observe.tally import Tally
    from rollout.runtime.batch_watch import BatchWindow
    from rollout.scheduling.journal.entries import PromptEntry
    from rollout.scheduling.journal.journal import Journal
    from rollout.scheduling.prompts import Member
    from rollout.scheduling.trajectory_runner import TrajectoryRunner
    from rollout.tensor_layout import Layout, Trim
    from rollout.types import Prompt
    from rollout.worker_threads import WorkerThreads

#: More members than these are made in a thread: so many take a millisecond or two.
MANY_MEMBERS = 500

logger = logging.getLogger("rollout")


class RolloutRuntime(EngineControls, GroupingRuntime, ExplainingRuntime):
    """Runs batches of trajectories on its engines; made by `open_rollout`.

    Several `generate` and `stream` calls may run at once; they share engines, threads and
    `scheduling.max_in_flight`.

    Attributes:
        config: What it was opened with.
        services: What its trajectories share, for what is built on a runtime.
        admission: `pause` and `resume` keep trajectories that have not started waiting.
        on_trajectory: Called on the loop with each trajectory of `generate` as it ends, in the
            order in which they do; None calls nothing. It must return at once; what it raises is
            logged.
    """

    def __init__(
        self,
        config: RolloutConfig,
        runner: TrajectoryRunner,
        threads: WorkerThreads,
        tally: Tally,
        run_seed: int,
        journal: Journal | None = None,
    ) -> None:
        self.config = config
        self._runner = runner
        self.services = runner.services
        self._threads = threads
        self._tally = tally
        self.admission = Admission(
            config.scheduling.max_in_flight, is_adaptive=config.scheduling.adaptive_admission
        )
        self._sleep = SleepBetweenBatches(
            runner.services.engines, is_wanted=config.engine.sleep_between_batches
        )
        self._long_work = LongWork()
        self._collation = Collation(
            config.lengths,
            runner.services.template,
            self._long_work,
            config.observe.path,
            config.media.position_rows,
            model=config.model,
        )
        services, self._run_seed = runner.services, run_seed
        self._journal = journal
        self._lag = LoopLag(services.events)
        self._watch = BatchWatch(services.events, services.engines, self._lag, tally)
        self._steps, self._clock = StepCount(), loop_clock()
        self._calls = OpenCalls()
        self._groups = GroupCalls(self._new_desk(), config, tally, runner.services.engines)
        self._misuse: str | None = None
        self._tasks: TaskGroup
        self._is_closing = False
        self.on_trajectory: Callable[[Trajectory], object] | None = None

    @property
    def template(self) -> ChatTemplate:
        """The model's tokenizer and chat format."""
        return self.services.template

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
        run = await self._new_run(prompts, samples, step, validate, layout, trim)
        rows: list[Trajectory | None] = [None] * len(run.members)

        def keep(row: int, trajectory: Trajectory) -> None:
            rows[row] = trajectory
            self._tell(trajectory)

        with self._watched("generate", run, validate) as window:
            try:
                async with self._sleep.awake():
                    with self._calls.running(run, run):
                        await run.run_keeping(keep)
            except Exception as error:
                for row, trajectory in run.unwritten:
                    rows[row] = trajectory
                await self._collation.attach(error, rows, window, layout, trim)
                raise
            try:
                batch = await self._collation.batch(rows, window, layout, trim)
            except Exception as error:  # too little memory, say, which less may have room in
                with suppress(Exception):
                    await self._collation.attach(error, rows, window, "packed")
                raise
        if self._journal is not None:
            logs = [member.log for member in run.members if member.log is not None]
            self._journal.delivered([log.key for log in logs if not log.is_taken])
        return batch

    @contextmanager
    def _watched(self, call: str, run: BatchRun, validate: bool) -> Iterator[BatchWindow]:
        groups = len({member.identity.group for member in run.members})
        with self._watch.window(
            call, run.step, validate=validate, prompts=groups, trajectories=len(run.members)
        ) as window:
            run.batch = window.batch
            yield window

    @asynccontextmanager
    async def stream(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int | None = None,
        step: int | None = None,
        validate: bool = False,
    ) -> AsyncIterator[TrajectoryStream]:
        """Trajectories as they end, in the order in which they do; leaving cancels the rest.

        A slow consumer slows the admission of further members. Use it with ``async with``: entered
        by hand and dropped, it ends its trajectories, and leaving `open_rollout` says so.

        Raises:
            PromptError: The prompts or another argument are unusable; nothing has been started.
            LimitExceeded: As `generate`, at the end of the block, when all have been received.
            RolloutError: The runtime was closed meanwhile.

        The `partial` of an error holds the trajectories that had ended, but for those that were
        received and are not referenced any more.
        """
        run = await self._new_run(prompts, samples, step, validate)
        with self._watched("stream", run, validate) as window:
            async with self._sleep.awake():
                streamed = StreamedRun(run)
                self._tasks.start_soon(self._produce, run, streamed)
                try:
                    with self._calls.entered(streamed):
                        yield streamed.received
                except GeneratorExit:  # it is collected as garbage
                    logger.error(STREAM_DROPPED)
                    self._misuse = STREAM_DROPPED
                    raise
                except anyio.ClosedResourceError:
                    if not streamed.is_closed:
                        raise  # else its receiver was closed with the runtime
                finally:
                    await streamed.end()
            if streamed.failure is not None:
                await self._collation.attach(streamed.failure, streamed.trajectories(), window)
                raise streamed.failure

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
        running = sum([run.cancel(uid, member, reason) for run in self._calls])
        return running + self._groups.cancel(uid, member, reason)

    def statistics(self) -> RuntimeStatistics:
        """A snapshot."""
        services = self.services
        return statistics_of(
            self._tally,
            services.engines,
            self._lag.total,
            abandoned_threads=self._threads.abandoned
            | services.texts.abandoned
            | services.media.abandoned,
            max_running=self.admission.allowed,
            journal=None if self._journal is None else self._journal.statistics(),
            sandboxes=services.sandboxes.statistics(),
        )

    async def _new_run(
        self,
        prompts: Sequence[Prompt],
        samples: int | None,
        step: int | None,
        validate: bool,
        layout: Layout = "padded",
        trim: Trim = False,
    ) -> BatchRun:
        self._refuse_when_closed()
        if self._journal is not None:
            self._journal.check_announced()
        step, samples = check_call(step, validate, samples, layout, trim)
        scheduling = self.config.scheduling
        deadline = Deadline.after(self.config.limits.batch_s, "limits.batch_s")
        samples = samples or scheduling.samples_of(validate=validate)
        is_long = isinstance(prompts, Sized) and len(prompts) * samples > MANY_MEMBERS
        with self._steps.counted(step) as step:
            make = partial(self._members, prompts, samples, step, validate)
            members, prompt_entries = await self._long_work.run(is_long, make)
        self._refuse_when_closed()
        if self._journal is not None:
            self._journal.put_all(prompt_entries)
        return BatchRun(
            members=members,
            runs=self._new_runs(),
            rewarding=self._runner.rewarding,
            deadline=deadline,
            config=scheduling,
            tally=self._tally,
            events=self.services.events,
            journal=self._journal,
        )

    def _new_desk(self) -> GroupDesk:
        return GroupDesk(
            self.config,
            self.engines,
            self._runner.rewarding,
            self._threads,
            self._tally,
            self._run_seed,
            self._new_runs,
            self._start,
            GroupLog(self._journal, has_group_reward=self._runner.rewarding.group is not None),
        )

    def _start(self, job: Callable[[], Coroutine[Any, Any, object]]) -> None:
        self._tasks.start_soon(job)

    def _new_runs(self) -> MemberRuns:
        wakes = self.services.engines.wakes
        return MemberRuns(self._runner, self.admission.limiter, self._tally, wakes)

    def _members(
        self, prompts: Sequence[Prompt], samples: int, step: int, validate: bool
    ) -> tuple[list[Member], list[PromptEntry]]:
        """Those of a call, once its prompts are known to be good; and what is written of them."""
        uids, services = check_prompts(prompts), self.services
        check_names(prompts, self.config.agent, services.tools.names, services.interactions)
        members = members_of(
            prompts,
            uids,
            samples=samples,
            step=step,
            run_seed=self._run_seed,
            validate=validate,
        )
        return members, [] if self._journal is None else self._journal.enrol(members)

    def _refuse_when_closed(self) -> None:
        if self._is_closing:
            raise RolloutError("the runtime is closed")

    def _tell(self, trajectory: Trajectory) -> None:
        if self.on_trajectory is None:
            return
        try:
            self.on_trajectory(trajectory)
        except Exception:
            logger.exception("on_trajectory raised at %s/%s", trajectory.uid, trajectory.member)

    async def _produce(self, run: BatchRun, streamed: StreamedRun) -> None:
        with self._calls.running(run, streamed):
            await streamed.produce()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Watch the loop and the engines' load; at the end no call is left.

        Raises:
            RolloutError: A stream was entered and not left.
        """
        async with open_task_group() as self._tasks:
            self._tasks.start_soon(self._watch.sample)
            if not has_virtual_clock():
                self._tasks.start_soon(self._lag.watch)
            loads = self.services.engines.loads
            self._tasks.start_soon(self.admission.adapt, loads, self._progress)
            try:
                await self._sleep.begin()
                yield
            finally:
                await self._end_calls()
        if self._misuse is not None:
            raise RolloutError(self._misuse)

    def _progress(self) -> Progress:
        tally = self._tally
        return Progress(tally.finished, tally.known_tokens, tally.reused_tokens)

    async def _end_calls(self) -> None:
        """End the calls of other tasks and wait until they use the engines no more."""
        self._is_closing = self._sleep.is_over = True
        if self._calls.has_stream_of_this_task:
            self._misuse = STREAM_DROPPED  # its block, left after the runtime, can never be left
        with anyio.CancelScope(shield=True):
            await self._calls.close()
            await self._groups.close()
