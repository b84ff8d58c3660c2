"""Wall and CPU clocks, for what happens outside the event loop's own time."""

from __future__ import annotations

import os
import threading
import time  # noqa: TID251  (this is the module)

#: Seconds of a clock that never goes back, the same in every thread.
monotonic = time.monotonic
#: Seconds since 1970, for records that people read.
wall = time.time
#: CPU seconds of the calling thread, and of the whole process.
thread_cpu = time.thread_time
process_cpu = time.process_time


class ThreadTimes:
    """What Linux says of a thread of this process; 0 and False once it has ended, or elsewhere.

    It is to be closed before the thread's number can be another's.
    """

    def __init__(self, native_id: int | None = None) -> None:
        number = threading.get_native_id() if native_id is None else native_id
        self._stat = _open_task_file(number, "stat")
        self._schedstat = _open_task_file(number, "schedstat")

    @property
    def cpu_s(self) -> float:
        """Seconds that it ran, exact to a few milliseconds."""
        return self._times()[0]

    @property
    def waited_s(self) -> float:
        """Seconds that it could have run and had no CPU; a wait counts when it is over."""
        return self._times()[1]

    @property
    def wants_cpu(self) -> bool:
        """Whether it runs or waits for a CPU now; False while it sleeps in a call."""
        # The name, in parentheses, may contain anything.
        return _read(self._stat).rpartition(b")")[2].lstrip().startswith(b"R")

    def close(self) -> None:
        """Let go of the files."""
        for file in (self._stat, self._schedstat):
            if file is not None:
                os.close(file)
        self._stat = self._schedstat = None

    def _times(self) -> tuple[float, float]:
        ran, waited, *_ = _read(self._schedstat).split() or (0, 0)
        return int(ran) / 1e9, int(waited) / 1e9


def _read(file: int | None) -> bytes:
    """What the file says; nothing where there is none, or its thread has ended."""
    try:
        return b"" if file is None else os.pread(file, 512, 0)
    except ProcessLookupError:
        return b""


def _open_task_file(number: int, name: str) -> int | None:
    try:
        return os.open(f"/proc/self/task/{number}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
