"""One batch in the foreground of a terminal: progress, Ctrl-C, and results on disk."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import anyio
import attrs

from rollout.cli.aside import set_aside, settle
from rollout.cli.exit_codes import SOME_FAILED
from rollout.cli.explain_signal import explaining_at_signal
from rollout.cli.progress import ProgressDisplay, details_of, show_progress
from rollout.cli.run_journal import (
    JOURNAL,
    ended_in,
    remove_earlier_batch,
    set_journal_aside,
)
from rollout.config import RolloutConfig
from rollout.disk_room import lacks_room
from rollout.errors import RolloutError
from rollout.observe.event_file import EVENTS
from rollout.plurals import count
from rollout.runtime.opening import open_rollout
from rollout.scheduling.rewards.functions import GivenRewards
from rollout.scopes import open_task_group
from rollout.types import Prompt
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from anyio.abc import TaskStatus
    from rich.console import Console

    from rollout.batch import RolloutBatch
    from rollout.cli.live_details import Detail
    from rollout.observe.explanation import Explanation
    from rollout.runtime.measuring import RuntimeStatistics
    from rollout.runtime.runtime import RolloutRuntime

#: From a signal to giving up on trajectories that have not ended by themselves: rewards that are
#: being computed, say. The last answers of engines come before that. Closing the engines takes up
#: to a second more.
GRACE_S = 1.5
#: Reason of trajectories that a signal has cancelled.
INTERRUPTED = "interrupted"


@attrs.frozen(kw_only=True)
class ForegroundJob:
    """What to run, and the directory that takes the results."""

    config: RolloutConfig
    prompts: Sequence[Prompt]
    directory: Path
    tools: Sequence[Any] = ()
    rewards: GivenRewards = attrs.field(factory=GivenRewards)
    interactions: Sequence[Any] = ()
    samples: int | None = None
    step: int | None = None
    validate: bool = False
    resume: bool = False

    @property
    def observed_config(self) -> RolloutConfig:
        """The configuration, with its events beside the results where it says nothing else."""
        config = self.config
        if config.observe.path is not None:
            return config
        observe = attrs.evolve(config.observe, path=str(self.directory))
        return attrs.evolve(config, observe=observe)

    def set_events_aside(self) -> None:
        """Those of an earlier run are continued where that is resumed only."""
        path = self.directory / EVENTS
        if self.config.observe.path is None and path.exists() and not self.resume:
            set_aside(path)

    def give_up_events(self) -> bool:
        """Leave the room that this run's events take to its results; whether there are any."""
        path = self.directory / EVENTS
        if self.config.observe.path is not None or self.resume or not path.exists():
            return False
        os.truncate(path, 0)  # it is open: removing it would free nothing
        return True

    def settle_events(self, *, is_saved: bool, are_given_up: bool) -> None:
        """Keep the events of what there are results of: of this run, or of the earlier one."""
        path = self.directory / EVENTS
        if self.config.observe.path is not None or self.resume:
            return
        if not is_saved or are_given_up:
            path.unlink(missing_ok=True)
        settle(path, has_results=is_saved)


class JobResult(NamedTuple):
    """What became of it.

    Attributes:
        batch: What there was; None where a signal came before the engines served.
        lost: Trajectories that had not ended when there was no more time for them.
        seconds: From the call of `generate` to its end.
        signal: The signal that ended it.
        written: Trajectories in the journal, written as they ended; counted where there is a
            fault.
        fault: Why the batch could not be saved; the journal is all that is on disk then.
    """

    batch: RolloutBatch | None
    lost: int
    seconds: float
    signal: signal.Signals | None
    written: int
    fault: RolloutError | None


async def run_job(job: ForegroundJob, console: Console) -> JobResult:
    """Run the job and save its batch; progress goes to `console`.

    The journal has each trajectory as it ends, so that what has ended is on disk whatever happens,
    and the run can be resumed.

    SIGINT and SIGTERM belong to it meanwhile. The first one cancels what has not ended and saves
    everything; where that takes longer than `GRACE_S`, or at a second signal, what has ended is
    saved. Until the engines serve and the batch begins, nothing is admitted and nothing is saved.

    Raises:
        RolloutError: As `open_rollout` and `RolloutRuntime.generate`.
    """
    threads = WorkerThreads(max_threads=2, max_abandoned=1)
    run = _Run(job, threads)
    set_journal_aside(job.config, job.directory, resume=job.resume)
    job.set_events_aside()
    try:
        await _perform(job, run, console)
    finally:
        run.settle()
    return run.result()


async def _perform(job: ForegroundJob, run: _Run, console: Console) -> None:
    with (
        ProgressDisplay(console) as display,
        run.without_lag_warnings(),
        explaining_at_signal(run.explain),
    ):
        async with open_task_group() as tasks:
            await tasks.start(run.watch_signals)
            tasks.start_soon(
                show_progress, display, _starting(job.config), run.statistics, run.details
            )
            tasks.start_soon(run.load)
            with run.starting:
                async with open_rollout(
                    job.observed_config,
                    job.tools,
                    job.rewards.single,
                    job.interactions,
                    group_reward=job.rewards.group,
                    resume=job.resume,
                ) as run.runtime:
                    tasks.start_soon(run.generate)
                    await run.leave.wait()
                    tasks.start_soon(run.end_process, console)
            if run.runtime is not None:
                await run.saved.wait()


def _starting(config: RolloutConfig) -> str:
    replicas = count(config.engine.replicas, "engine")
    return f"starting {replicas} ({config.engine.kind}, {config.placement.kind})"


class _Run:
    """The tasks of one job."""

    def __init__(self, job: ForegroundJob, threads: WorkerThreads) -> None:
        self._job = job
        self.threads = threads
        self._loaded = anyio.Event()
        self._has_begun = False
        self.starting = anyio.CancelScope()
        self.runtime: RolloutRuntime | None = None
        self.leave = anyio.Event()
        self.saved = anyio.Event()
        self.batch: RolloutBatch | None = None
        self.seconds = 0.0
        self.signal: signal.Signals | None = None
        self.fault: RolloutError | None = None
        self.events_are_given_up = False

    def result(self) -> JobResult:
        """What became of the job, once its tasks have ended."""
        statistics = self.statistics()
        kept = 0 if self.batch is None else len(self.batch.trajectories)
        lost = 0 if statistics is None else statistics.admitted - kept
        written = 0 if self.fault is None else ended_in(self._job.config)
        return JobResult(self.batch, lost, self.seconds, self.signal, written, self.fault)

    def statistics(self) -> RuntimeStatistics | None:
        """The runtime's, once it has something to do."""
        statistics = None if self.runtime is None else self.runtime.statistics()
        return statistics if statistics is not None and statistics.admitted else None

    def details(self) -> Sequence[Detail]:
        """What a terminal shows below the line of progress."""
        return () if self.runtime is None else details_of(self.runtime)

    def explain(self) -> Explanation | None:
        """The runtime's, once there is one."""
        return None if self.runtime is None else self.runtime.explain()

    @contextmanager
    def without_lag_warnings(self) -> Iterator[None]:
        """Until the batch begins, what blocks the event loop are imports, and no task waits."""
        logger = logging.getLogger("rollout.observe")

        def is_worth_saying(_: logging.LogRecord) -> bool:
            return self._has_begun

        logger.addFilter(is_worth_saying)
        try:
            yield
        finally:
            logger.removeFilter(is_worth_saying)

    async def load(self) -> None:
        """Import what collates, while the engines start; on the loop it would delay signals."""
        await self.threads.run("import", importlib.import_module, "rollout.batch")
        self._loaded.set()

    async def generate(self) -> None:
        """Run the batch, or what of it there is time for, and save it."""
        assert self.runtime is not None
        await self._loaded.wait()
        if self.signal is not None:  # before anything was admitted
            self.saved.set()
            return
        self._has_begun = True
        job = self._job
        began = anyio.current_time()
        async with open_task_group() as tasks:
            tasks.start_soon(self._remove_earlier_batch)
            try:
                self.batch = await self.runtime.generate(
                    job.prompts, samples=job.samples, step=job.step, validate=job.validate
                )
            except RolloutError as error:
                if error.partial is None:
                    raise
                self.batch = cast("RolloutBatch", error.partial)
        if self.batch.samples:
            remove_earlier_batch(job.directory)
        self.seconds = anyio.current_time() - began
        with anyio.CancelScope(shield=True):
            self.fault = await self._save(self.batch)
            if self.fault is not None and lacks_room(self.fault.__cause__):
                self.events_are_given_up = job.give_up_events()
                if self.events_are_given_up:
                    self.fault = await self._save(self.batch)
        self.saved.set()
        self.leave.set()

    async def _remove_earlier_batch(self) -> None:
        """Remove what an earlier run left there as soon as a trajectory of this one has ended."""
        assert self.runtime is not None
        while not self.runtime.statistics().finished:  # noqa: ASYNC110
            await anyio.sleep(0.1)
        remove_earlier_batch(self._job.directory)

    async def _save(self, batch: RolloutBatch) -> RolloutError | None:
        """Why the batch cannot be saved; None where it is."""
        try:
            save = functools.partial(batch.save, overwrite=True)  # `--overwrite` was asked before
            await self.threads.run("save", save, self._job.directory)
        except RolloutError as error:
            return error
        return None

    def settle(self) -> None:
        """Put away what the journal and the events are not needed for any more."""
        job = self._job
        if not job.resume:
            settle(job.directory / JOURNAL, has_results=self.batch is not None)
        job.settle_events(
            is_saved=self.batch is not None and self.fault is None,
            are_given_up=self.events_are_given_up,
        )

    async def end_process(self, console: Console) -> None:
        """End the process where closing the runtime waits for code that cannot be stopped."""
        assert self.runtime is not None
        cleanup_s = self._job.config.limits.cleanup_s
        containment = self.runtime.services.containment
        await containment.is_delayed.wait()
        await anyio.sleep(cleanup_s)
        await self.saved.wait()
        self.settle()
        message = (
            f"{containment.describe_rest()} did not end within limits.cleanup_s = {cleanup_s:g} s"
        )
        where = f"the results are in {self._job.directory}"
        console.print(f"error: {message}; {where}", markup=False, soft_wrap=True)
        console.file.flush()
        os._exit(SOME_FAILED)

    async def watch_signals(self, *, task_status: TaskStatus[None]) -> None:
        """End the job at a signal; once it does, further signals change nothing."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            self.signal = await anext(signals)
            if self.runtime is None or not self._has_begun:
                self.starting.cancel()
            else:
                self.runtime.cancel(reason=INTERRUPTED)
                with anyio.move_on_after(GRACE_S):
                    await anext(signals)
                self.leave.set()
            async for _ in signals:
                pass  # what it had not taken by its end, trio would raise once more
