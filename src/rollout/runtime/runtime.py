"""The runtime: engines, tools and threads of a rollout, owned by one scope."""

from __future__ import annotations

import itertools
import logging
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import anyio
import attrs

from rollout.bridge import has_virtual_clock
from rollout.engine.wire.operations import ALL_TAGS
from rollout.errors import EngineError, RolloutError
from rollout.limits import Deadline
from rollout.observe.loop_lag import LoopLag
from rollout.runtime.heap import collect_as_memory_asks, collections_put_off
from rollout.runtime.statistics import RuntimeStatistics
from rollout.scheduling.admission import Admission
from rollout.scheduling.batch_run import BatchRun
from rollout.scheduling.call_arguments import check_call, check_target
from rollout.scheduling.pressure import Progress
from rollout.scheduling.prompt_names import check_names
from rollout.scheduling.prompts import check_prompts, members_of
from rollout.scheduling.streamed_run import StreamedRun
from rollout.scopes import open_task_group
from rollout.seeds import fresh_seed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from anyio.abc import TaskGroup
    from anyio.streams.memory import MemoryObjectReceiveStream

    from rollout.batch import RolloutBatch
    from rollout.chat import ChatTemplate
    from rollout.chat.trajectory import Trajectory
    from rollout.config import RolloutConfig
    from rollout.engine.driver.pool import EnginePool
    from rollout.engine.weights import UpdateMode, WeightSource
    from rollout.observe.loop_lag import LagWindow
    from rollout.observe.tally import Tally
    from rollout.scheduling.trajectory_runner import TrajectoryRunner
    from rollout.types import Prompt
    from rollout.worker_threads import WorkerThreads

#: Between batches a trainer needs all of the memory, and gives new weights as a rule.
SLEEP_BETWEEN_BATCHES_LEVEL = 2

STREAM_DROPPED = (
    "runtime.stream() was entered and never left: its trajectories were cancelled; use "
    "`async with runtime.stream(...) as trajectories:`"
)

logger = logging.getLogger("rollout")


class RolloutRuntime:
    """Runs batches of trajectories on its engines; made by `open_rollout`.

    Several `generate` and `stream` calls may run at once; they share engines, threads and
    `scheduling.max_in_flight`.

    Attributes:
        config: What it was opened with.
        admission: `pause` and `resume` keep trajectories that have not started waiting.
        on_trajectory: Called on the loop with each trajectory of `generate` as it ends, in the
            order in which they do; None calls nothing. It must return at once; what it raises is
            logged.
    """

    def __init__(
        self, config: RolloutConfig, runner: TrajectoryRunner, threads: WorkerThreads, tally: Tally
    ) -> None:
        self.config = config
        self._runner = runner
        self._threads = threads
        self._tally = tally
        self.admission = Admission(
            config.scheduling.max_in_flight, is_adaptive=config.scheduling.adaptive_admission
        )
        self._lag = LoopLag()
        self._run_seed = fresh_seed() if config.seed is None else config.seed
        self._steps = itertools.count()
        self._calls: dict[BatchRun, BatchRun | StreamedRun] = {}
        self._streams: dict[StreamedRun, int] = {}  # with the task that entered each
        self._misuse: str | None = None
        self._tasks: TaskGroup
        self._idle = anyio.Event()
        self._is_closing = False
        self._batches = 0
        self._unhurried = collections_put_off if config.scheduling.freeze_heap else nullcontext
        self.on_trajectory: Callable[[Trajectory], object] | None = None

    @property
    def template(self) -> ChatTemplate:
        """The model's tokenizer and chat format."""
        return self._runner.services.template

    @property
    def engines(self) -> EnginePool:
        """The engines: replicas can be added, removed and drained there while calls run."""
        return self._runner.services.engines

    async def update_weights(
        self, *, version: int, source: WeightSource, mode: UpdateMode = "abort_and_resume"
    ) -> None:
        """Every engine has these weights afterwards; see `EnginePool.update_weights`.

        Args:
            version: What tokens sampled with them are stamped with, in `weight_versions`.
            mode: What becomes of generations under way: "wait", "abort_and_resume" or "in_place".

        Raises:
            EngineError: No engine could load them; all keep the weights that they have.
            RolloutError: The runtime is closed.
        """
        if self._is_closing:
            raise RolloutError("the runtime is closed")
        await self.engines.update_weights(version, source, mode)

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

    async def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int | None = None,
        step: int | None = None,
        validate: bool = False,
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

        Raises:
            PromptError: The prompts or another argument are unusable; nothing has been started.
            LimitExceeded: More members failed than `scheduling.max_failures` allows, or
                `scheduling.on_deadline` is "raise" and the time is over.
            RolloutError: The runtime was closed meanwhile.

        Errors after the start carry what there was as `partial`.
        """
        run = self._new_run(prompts, samples, step, validate)
        rows: list[Trajectory | None] = [None] * len(run.members)

        async def keep(row: int, trajectory: Trajectory) -> None:
            rows[row] = trajectory
            self._tell(trajectory)

        with self._unhurried(), self._lag.window() as window:
            try:
                async with self._awake():
                    with self._running(run, run):
                        await run.run(keep)
            except Exception as error:
                _attach(error, self._collated(rows, window))
                raise
            return self._collated(rows, window)

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

        A slow consumer slows the admission of further members. Use it with ``async with``: entered
        by hand and dropped, it ends its trajectories, and leaving `open_rollout` says so.

        Raises:
            PromptError: The prompts or another argument are unusable; nothing has been started.
            LimitExceeded: As `generate`, at the end of the block, when all have been received.
            RolloutError: The runtime was closed meanwhile.

        The `partial` of an error holds the trajectories that had ended, but for those that were
        received and are not referenced any more.
        """
        run = self._new_run(prompts, samples, step, validate)
        with self._unhurried(), self._lag.window() as window:
            async with self._awake():
                streamed = StreamedRun(run)
                self._tasks.start_soon(self._produce, run, streamed)
                self._streams[streamed] = anyio.get_current_task().id
                try:
                    yield streamed.received
                except GeneratorExit:  # it is collected as garbage
                    logger.error(STREAM_DROPPED)
                    self._misuse = STREAM_DROPPED
                    raise
                except anyio.ClosedResourceError:
                    if not streamed.is_closed:
                        raise  # else its receiver was closed with the runtime
                finally:
                    del self._streams[streamed]
                    await streamed.end()
        if streamed.failure is not None:
            _attach(streamed.failure, self._collated(streamed.trajectories(), window))
            raise streamed.failure

    def cancel(
        self, uid: str | None = None, member: int | None = None, *, reason: str = "cancelled"
    ) -> int:
        """End trajectories with outcome `cancelled` and keep their tokens; `generate` returns.

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
        return sum(run.cancel(uid, member, reason) for run in self._calls)

    def statistics(self) -> RuntimeStatistics:
        """A snapshot."""
        tally, engines = self._tally, self.engines
        replicas = engines.statistics()
        return RuntimeStatistics(
            admitted=tally.admitted,
            running=tally.running,
            finished=tally.finished,
            outcomes={outcome.value: n for outcome, n in tally.outcomes.items() if n},
            generated_tokens=tally.generated_tokens + engines.tokens_under_way,
            tool_calls=tally.tool_calls,
            replicas=replicas,
            zombies=sum(replica.zombies for replica in replicas),
            recoveries=attrs.evolve(engines.recoveries),
            unresponsive=tally.unresponsive,
            abandoned_threads=self._threads.abandoned | self._runner.services.texts.abandoned,
            max_running=self.admission.allowed,
            loop_lag_s=self._lag.total.blocked_s or 0.0,
            loop_starved_s=self._lag.total.starved_s or 0.0,
        )

    def _new_run(
        self, prompts: Sequence[Prompt], samples: int | None, step: int | None, validate: bool
    ) -> BatchRun:
        if self._is_closing:
            raise RolloutError("the runtime is closed")
        step, samples = check_call(step, validate, samples)
        prompts = check_prompts(prompts)
        services = self._runner.services
        check_names(prompts, self.config.agent, services.tools.names, services.interactions)
        deadline = Deadline.after(self.config.limits.batch_s, "limits.batch_s")
        scheduling = self.config.scheduling
        members = members_of(
            prompts,
            samples=samples or scheduling.samples_of(validate=validate),
            step=next(self._steps) if step is None else step,
            run_seed=self._run_seed,
            validate=validate,
        )
        return BatchRun(
            members=members,
            runner=self._runner,
            limiter=self.admission.limiter,
            deadline=deadline,
            config=scheduling,
            tally=self._tally,
            wakes=services.engines.wakes,
        )

    def _tell(self, trajectory: Trajectory) -> None:
        if self.on_trajectory is None:
            return
        try:
            self.on_trajectory(trajectory)
        except Exception:
            logger.exception("on_trajectory raised at %s/%s", trajectory.uid, trajectory.member)

    @asynccontextmanager
    async def _awake(self) -> AsyncIterator[None]:
        """The engines are awake for a batch, where they sleep between batches."""
        if not self.config.engine.sleep_between_batches:
            yield
            return
        self._batches += 1
        try:
            await self.engines.wake_up()
            yield
        finally:
            self._batches -= 1
            if not self._batches and not self._is_closing:
                with anyio.CancelScope(shield=True):  # bounded: the pool limits each replica
                    await self._put_to_sleep()

    async def _put_to_sleep(self) -> None:
        """A batch that is done is not lost because engines do not fall asleep after it."""
        try:
            await self.engines.sleep(SLEEP_BETWEEN_BATCHES_LEVEL)
        except EngineError as error:
            logger.warning("the engines stay awake: %s", error)

    async def _produce(self, run: BatchRun, streamed: StreamedRun) -> None:
        with self._running(run, streamed):
            await streamed.produce()

    @contextmanager
    def _running(self, run: BatchRun, call: BatchRun | StreamedRun) -> Iterator[None]:
        """Make the call known to `cancel` and to `_end_calls`."""
        self._calls[run] = call
        try:
            yield
        finally:
            del self._calls[run]
            if not self._calls:
                self._idle.set()

    def _collated(self, rows: Sequence[Trajectory | None], window: LagWindow) -> RolloutBatch:
        from rollout.batch import collate  # torch, loaded while the runtime opens

        return collate(
            [trajectory for trajectory in rows if trajectory is not None],
            self.config.lengths,
            self.template.pad_token_id,
            decode=self.template.decode,
            extra_metrics=window.metrics,
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Watch the loop and the engines' load; at the end no call is left.

        Raises:
            RolloutError: A stream was entered and not left.
        """
        async with open_task_group() as self._tasks:
            if not has_virtual_clock():
                self._tasks.start_soon(self._lag.watch)
                if self.config.scheduling.freeze_heap:
                    self._tasks.start_soon(collect_as_memory_asks)
            loads = self._runner.services.engines.loads
            self._tasks.start_soon(self.admission.adapt, loads, self._progress)
            try:
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
        self._is_closing = True
        if anyio.get_current_task().id in self._streams.values():
            self._misuse = (
                STREAM_DROPPED  # a block that leaves the runtime first can never leave it
            )
        with anyio.CancelScope(shield=True):
            while self._calls:
                self._idle = anyio.Event()
                for call in self._calls.values():
                    call.close()
                await self._idle.wait()


def _attach(error: BaseException, partial: RolloutBatch) -> None:
    """Let what there was travel with the error that ended a call, whatever its type."""
    with suppress(AttributeError):  # some have no room for it
        error.partial = partial  # type: ignore[attr-defined]
