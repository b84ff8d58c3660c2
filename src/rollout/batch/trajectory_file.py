"""``trajectories.jsonl`` while a batch runs: a line for each trajectory as it ends."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from rollout.batch.disk import unwritable
from rollout.batch.records import trajectory_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from io import FileIO
    from pathlib import Path

    from rollout.chat.trajectory import Trajectory


class TrajectoryFile:
    """Takes trajectories in the order in which they end; each stands in the file at once, whole.

    What cannot be written waits in memory for the next call, in its order. The file is made with
    the first line, in the place of one that is there. Blocks while it writes; for one thread.

    Args:
        path: The file.
        replaced: Files of an earlier batch, which are no longer true with the first line.
        decode: Ids to text, written beside the ids of every span.

    Attributes:
        count: Lines in the file.
        waiting: Trajectories that could not be written so far.
    """

    def __init__(
        self,
        path: Path,
        replaced: Sequence[Path] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.count = 0
        self.waiting: deque[Trajectory] = deque()
        self._path = path
        self._replaced = replaced
        self._decode = decode
        self._file: FileIO | None = None

    def append(self, trajectories: Sequence[Trajectory] = ()) -> None:
        """Write what waits, and these after it.

        Raises:
            RolloutError: There is no room, or the file cannot be written; names it, what is
                needed and what there is. What was written stays.
        """
        self.waiting += trajectories
        while self.waiting:
            trajectory = self.waiting.popleft()
            line = trajectory_line(trajectory, self._decode) + b"\n"
            try:
                self._write(line)
            except OSError as error:
                self.waiting.appendleft(trajectory)
                raise unwritable(self._path, error, len(line)) from error
            self.count += 1

    def close(self) -> None:
        """Let go of the file; it stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: bytes) -> None:
        """The line, or nothing of it."""
        if self._file is None:
            for path in (*self._replaced, self._path):
                path.unlink(missing_ok=True)
            self._file = self._path.open("xb", buffering=0)
        start = self._file.tell()
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(start)
            self._file.seek(start)
            raise
