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
import threading
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36


def find_children() -> list[int]:
    """Processes whose parent this is; orphans are handed to it."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found


def end_all() -> None:
    """Kill one generation after another, remove their directory, and leave."""
    for _ in range(1000):
        children = find_children()
        if not children:
            break
        for pid in children:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with suppress(OSError):
                os.waitpid(pid, 0)
    shutil.rmtree(CONFINEMENT["cwd"], ignore_errors=True)
    os._exit(0)


def watch_input() -> None:
    poll = select.poll()
    poll.register(0, 0)  # its end alone
    poll.poll()
    threading.Event().wait(2.0)  # the host leaves by itself
    end_all()


def main() -> None:
    import sandlock  # type: ignore[import-not-found,unused-ignore]

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    threading.Thread(target=watch_input, daemon=True).start()
    process = sandlock.Sandbox(**CONFINEMENT).popen(sys.argv[2:])
    process.wait()
    end_all()


CONFINEMENT = json.loads(sys.argv[1])
main()
