"""Wall and CPU clocks, for what happens outside the event loop's own time."""

from __future__ import annotations

import time  # noqa: TID251  (this is the module)

#: Seconds of a clock that never goes back, the same in every thread.
monotonic = time.monotonic
#: Seconds since 1970, for records that people read.
wall = time.time
#: CPU seconds of the calling thread, and of the whole process.
thread_cpu = time.thread_time
process_cpu = time.process_time
