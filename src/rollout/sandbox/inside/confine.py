"""Starts the host of a sandbox under sandlock, and ends all that is left of it.

    python3 -c CONFINE '{"cwd": DIRECTORY, …}' PROGRAM ARGUMENT…

What runs inside cannot reach this process. It ends, and everything inside with it, when the host
does or when its standard input's other end is closed, which the host reads.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import sys
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36


def find_children() -> list[int]:
    """Processes whose parent this is; orphans are handed to it."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found


def main() -> None:
    import sandlock  # type: ignore[import-not-found,import-untyped,unused-ignore]

    confinement = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    host = sandlock.Sandbox(**confinement).popen(sys.argv[2:])
    poll = select.poll()
    poll.register(0, 0)  # its end alone
    poll.register(os.pidfd_open(host.pid), select.POLLIN)
    poll.poll()
    poll.unregister(0)
    poll.poll(2000)  # the host leaves by itself, if nobody has stopped it
    while children := find_children():  # one generation after another
        for pid in children:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with suppress(OSError):
                os.waitpid(pid, 0)
    shutil.rmtree(confinement["cwd"], ignore_errors=True)
    os._exit(0)


main()
