"""What a runtime offers to those who take groups: `collect`, `stream_groups`, `discard_carried`."""

from __future__ import annotations

from contextlib import asynccontextmanager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING

from rollout.errors import SourceEnded
from rollout.runtime.collation import attach
from rollout.scheduling.call_arguments import check_call, check_groups
from rollout.scheduling.group_handover import made

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from rollout.batch import RolloutBatch
    from rollout.chat.group import Group
    from rollout.chat.trajectory import Trajectory
    from rollout.config import GroupPolicy
    from rollout.runtime.batch_watch import BatchWatch
    from rollout.runtime.collation import Collation
    from rollout.runtime.group_calls import GroupCalls, GroupStream
    from rollout.runtime.open_calls import OpenCalls
    from rollout.runtime.sleep_between_batches import SleepBetweenBatches
    from rollout.runtime.step_count import StepCount
    from rollout.scheduling.group_run import GroupRun
    from rollout.scheduling.prompt_source import Source
    from rollout.scheduling.pulled_group import PulledGroup
    from rollout.tensor_layout import Layout, Trim


class GroupingRuntime:
    """The part of a `RolloutRuntime` that takes groups of its caller's choice."""

    _groups: GroupCalls
    _watch: BatchWatch
    _sleep: SleepBetweenBatches
    _collation: Collation
    _calls: OpenCalls
    _steps: StepCount
    _refuse_when_closed: Callable[[], None]

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
        free and is left where it was: what was pulled and not used stays with the runtime and
        comes first in the next call with this source, or in the next one of all where it is over.
        Cancellation leaves it there too, and passes through.

        Args:
            source: Any iterable or async iterable of `Prompt`, endless ones too, or what has them
                by number, as map-style datasets do. It may block: it is asked in a thread, unless
                it is a sequence. An async one is always asked in the same task; an async generator
                is closed there, with the runtime at the latest.
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
        self._refuse_when_closed()
        step, _ = check_call(step, validate=False, samples=None, layout=layout, trim=trim)
        call = self._groups.checked(source, policy, groups=groups)
        with self._steps.counted(step) as step:
            run = self._groups.run_of(call, step, int(groups))
        window_of = self._watch.window("collect", step, prompts=int(groups))
        with window_of as window:
            run.batch = window.batch
            found: list[PulledGroup] = []
            try:
                serve = partial(self._serve, run)
                async with self._sleep.awake(), self._groups.running(run, serve):
                    found = await run.all_groups()
                rows, error = rows_of([*map(made, found)]), run.fault(groups, len(found))
                metrics = run.metrics()
                batch = await self._collation.batch(rows, window, layout, trim, extra=metrics)
            except BaseException:  # cancelled, or no room for tensors: nobody has them
                run.handover.give_back(found)
                raise
            if error is None and len(found) < groups:
                run.handover.note_missing(groups - len(found))
            failure = await run.handover.give(found)
            if len(found) < groups:
                run.handover.tell_end(is_recorded=isinstance(error, SourceEnded))
            error = error or failure
            if error is None:
                return batch
            attach(error, batch)
            try:
                raise error
            finally:
                del error, failure  # its traceback holds this frame

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
        self._refuse_when_closed()
        step, _ = check_call(step, validate=False, samples=None)
        call = self._groups.checked(
            source, policy, max_staleness=max_staleness, groups_per_step=groups_per_step
        )
        with self._steps.counted(step) as step:
            run = self._groups.run_of(call, step, None, max_staleness, groups_per_step)
        with self._watch.window("stream_groups", step) as window:
            run.batch = window.batch
            async with self._sleep.awake(), self._groups.running(run, partial(self._serve, run)):
                with self._calls.entered(run):
                    yield self._groups.stream_of(run)

    async def batch_of(
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
        with self._watch.measured() as window:
            return await self._collation.batch(rows_of(groups), window, layout, trim)

    async def discard_carried(self) -> int:
        """End carried trajectories as `cancelled`; how many there were.

        Their groups are dropped with all that they had. Prompts that were pulled and never
        started stay, and so do trajectories that wait in a call which is open: `cancel` them.
        """
        return await self._groups.discard_carried()

    async def _serve(self, run: GroupRun) -> None:
        with self._calls.running(run, run):
            await run.serve()


def rows_of(groups: Sequence[Group]) -> list[Trajectory]:
    """The trajectories of a batch of these groups, numbered by their places in it.

    They are the batch's own: a group may stand in other batches too, at other places.
    """
    rows = []
    for place, group in enumerate(groups):
        for trajectory in map(copy, group.trajectories):
            trajectory.group = place
            rows.append(trajectory)
    return rows
