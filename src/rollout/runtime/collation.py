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

    from rollout.batch import RolloutBatch
    from rollout.batch.saved_tokenizer import BatchTokenizer
    from rollout.chat import ChatTemplate
    from rollout.chat.trajectory import Trajectory
    from rollout.config import LengthsConfig, ModelConfig
    from rollout.runtime.measuring import BatchWindow
    from rollout.tensor_layout import Layout, Trim

#: Pieces of work that are done at once; others wait. They share the machine with the event loop.
MAX_THREADS = 2

#: Places of tokens that are laid out as fast as a thread is asked to.
SHORT = 1 << 16


class Collation:
    """Makes the batches of a runtime."""

    def __init__(
        self,
        lengths: LengthsConfig,
        template: ChatTemplate,
        events_path: str | None,
        position_rows: int = 3,
        *,
        model: ModelConfig,
    ) -> None:
        self._events_path = None if events_path is None else Path(events_path)
        self._lengths = lengths
        self._position_rows = position_rows
        self._template = template
        self._model = model
        self._tokenizer: BatchTokenizer | None = None
        self._limiter = anyio.CapacityLimiter(MAX_THREADS)
        self._has_packed = False

    async def batch(
        self,
        rows: Sequence[Trajectory | None],
        window: BatchWindow,
        layout: Layout = "padded",
        trim: Trim = False,
        *,
        extra: Mapping[str, float] | None = None,
    ) -> RolloutBatch:
        """`rollout.batch.collate` of what there is; cancellation waits for its end.

        Args:
            extra: Further metrics of the batch.
        """
        trajectories = [trajectory for trajectory in rows if trajectory is not None]
        metrics = {**window.metrics, **(extra or {})}
        work = partial(self._batch, trajectories, metrics, layout, trim)
        places = self._lengths.prompt + self._lengths.response + 2 * int(trim)
        is_long = places * sum(len(each.segments) for each in trajectories) > SHORT
        transcripts = [row for each in trajectories for row in each.transcripts]
        is_long |= any(row.media or row.expert_shape is not None for row in transcripts)
        is_packed = layout == "packed"
        is_long |= is_packed and not self._has_packed  # torch imports what nested tensors need
        batch = await run_in_thread(work, limiter=self._limiter) if is_long else work()
        self._has_packed |= is_packed  # now: what came meanwhile would wait for these imports
        window.found = batch.metrics
        batch.number, batch.events_path = window.batch, self._events_path
        batch.tokenizer = self._tokenizer
        return batch

    async def attach(
        self,
        error: BaseException,
        rows: Sequence[Trajectory | None],
        window: BatchWindow,
        layout: Layout = "padded",
        trim: Trim = False,
    ) -> None:
        """Let what there was travel with the error that ended a call, whatever its type."""
        attach(error, await self.batch(rows, window, layout, trim))

    def _batch(
        self,
        trajectories: Sequence[Trajectory],
        metrics: Mapping[str, float],
        layout: Layout,
        trim: Trim,
    ) -> RolloutBatch:
        from rollout.batch import collate  # torch, loaded while the runtime opens
        from rollout.batch.saved_tokenizer import BatchTokenizer, TokenizerRecord

        model = TokenizerRecord(path=self._model.path, revision=self._model.revision)
        self._tokenizer = self._tokenizer or BatchTokenizer(model, self._template)
        return collate(
            trajectories,
            self._lengths,
            self._template.pad_token_id,
            layout,
            trim=trim,
            decode=self._template.decode,
            extra_metrics=metrics,
            processor=self._template.processor,
            position_rows=self._position_rows,
        )


def attach(error: BaseException, batch: RolloutBatch) -> None:
    """Let a batch travel with an error, whatever its type."""
    with suppress(AttributeError):  # some have no room for it
        error.partial = batch  # type: ignore[attr-defined]
