"""Trajectories on disk as they end, whatever becomes of their batch."""

from __future__ import annotations

import logging
import math
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio

from rollout.chat.trajectory import Trajectory
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from anyio.streams.memory import MemoryObjectReceiveStream

    from rollout.batch.trajectory_file import TrajectoryFile
    from rollout.runtime.runtime import RolloutRuntime
    from rollout.worker_threads import WorkerThreads

logger = logging.getLogger("rollout")


@asynccontextmanager
async def appending(
    runtime: RolloutRuntime, directory: Path, threads: WorkerThreads
) -> AsyncIterator[TrajectoryFile]:
    """Trajectories of `generate` that end within the block are on disk after it, given room.

    They are appended to ``trajectories.jsonl``, in the order in which they end, by a thread. Where
    that fails the trajectories are kept, and written once there is room; they are in memory in
    any case, and `generate` returns them. With the first line, files of an earlier batch go.
    """
    from rollout.batch.storage import FILES, META, TRAJECTORIES  # with torch
    from rollout.batch.trajectory_file import TrajectoryFile

    file = TrajectoryFile(
        directory / TRAJECTORIES,
        replaced=[directory / name for name in (META, *FILES)],
        decode=runtime.template.decode,
    )
    # Without bound: what waits here, the batch holds as well.
    send, ended = anyio.create_memory_object_stream[Trajectory](math.inf)
    runtime.on_trajectory = send.send_nowait
    try:
        async with open_task_group() as tasks:
            tasks.start_soon(_append, file, ended, threads)
            with send:
                yield file
    finally:
        runtime.on_trajectory = None
        file.close()


async def _append(
    file: TrajectoryFile, ended: MemoryObjectReceiveStream[Trajectory], threads: WorkerThreads
) -> None:
    """Shielded, so that none that has ended is left out; what fails is said once."""
    is_failing = False
    with ended, anyio.CancelScope(shield=True):
        while trajectories := await _next(ended):
            try:
                await threads.run("append", file.append, trajectories)
            except Exception as error:
                if not is_failing:
                    logger.warning("%s; the run continues, and tries again", error)
                is_failing = True
            else:
                is_failing = False


async def _next(ended: MemoryObjectReceiveStream[Trajectory]) -> list[Trajectory]:
    """What has ended since, at least one; none at the end."""
    trajectories: list[Trajectory] = []
    with suppress(anyio.EndOfStream, anyio.WouldBlock):
        trajectories.append(await ended.receive())
        while True:
            trajectories.append(ended.receive_nowait())
    return trajectories
