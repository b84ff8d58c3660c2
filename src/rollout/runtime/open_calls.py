"""The calls of a runtime that have not ended, and the streams that were entered and not left."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import anyio

from rollout.scheduling.batch_run import BatchRun
from rollout.scheduling.group_run import GroupRun
from rollout.scheduling.streamed_run import StreamedRun

if TYPE_CHECKING:
    from collections.abc import Iterator

Call: TypeAlias = BatchRun | StreamedRun | GroupRun


class OpenCalls(dict[BatchRun | GroupRun, Call]):
    """What runs for each call, and the call itself, which is what closing the runtime ends."""

    def __init__(self) -> None:
        super().__init__()
        self._is_closing = False
        self._tasks: dict[StreamedRun | GroupRun, int] = {}
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

    @contextmanager
    def entered(self, stream: StreamedRun | GroupRun) -> Iterator[None]:
        """The current task has entered the stream, until the block is left."""
        self._tasks[stream] = anyio.get_current_task().id
        try:
            yield
        finally:
            del self._tasks[stream]

    @property
    def has_stream_of_this_task(self) -> bool:
        """Whether the current task has entered one that it has not left."""
        return anyio.get_current_task().id in self._tasks.values()

    async def close(self) -> None:
        """End the calls, which are other tasks', and wait until none is left."""
        self._is_closing = True
        while self:
            self._idle = anyio.Event()
            for call in self.values():
                call.close()
            await self._idle.wait()
