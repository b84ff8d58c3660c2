"""Finished trajectories made into batches, beside the event loop."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.agents.services import Services
    from rollout.batch import RolloutBatch
    from rollout.chat.trajectory import Trajectory
    from rollout.runtime.measuring import BatchWindow
    from rollout.tensor_layout import Layout, Trim

#: Batches that are made at once; others wait. They share the machine with the event loop.
MAX_THREADS = 2


class Collation:
    """Makes the batches of a runtime."""

    def __init__(self, services: Services) -> None:
        self._config, self._template = services.config, services.template
        self._limiter = anyio.CapacityLimiter(MAX_THREADS)

    async def batch(
        self,
        rows: Sequence[Trajectory | None],
        window: BatchWindow,
        layout: Layout = "padded",
        trim: Trim = False,
        *,
        extra: Mapping[str, float] | None = None,
    ) -> RolloutBatch:
        """`rollout.batch.collate` of what there is, in a thread; cancellation waits for its end.

        Args:
            extra: Further metrics of the batch.
        """
        trajectories = [trajectory for trajectory in rows if trajectory is not None]
        metrics = {**window.metrics, **(extra or {})}
        work = partial(self._collate, trajectories, metrics, layout, trim)
        batch = await run_in_thread(work, limiter=self._limiter)
        window.found = batch.metrics
        path = self._config.observe.path
        batch.number, batch.events_path = window.batch, None if path is None else Path(path)
        return batch

    def _collate(
        self,
        trajectories: Sequence[Trajectory],
        metrics: Mapping[str, float],
        layout: Layout,
        trim: Trim,
    ) -> RolloutBatch:
        from rollout.batch import collate  # torch, loaded while the runtime opens
        from rollout.batch.storage import BatchTokenizer

        config, template = self._config, self._template
        batch = collate(
            trajectories,
            config.lengths,
            template.pad_token_id,
            layout,
            trim=trim,
            decode=template.decode,
            extra_metrics=metrics,
            processor=template.processor,
            position_rows=config.media.position_rows,
        )
        model = config.model
        batch.tokenizer = BatchTokenizer(path=model.path, revision=model.revision)
        return batch


def attach(error: BaseException, batch: RolloutBatch) -> None:
    """Let a batch travel with an error, whatever its type."""
    with suppress(AttributeError):  # some have no room for it
        error.partial = batch  # type: ignore[attr-defined]
