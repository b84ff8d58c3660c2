"""What a test left behind in its process: threads, child processes, open files and sockets."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

#: Real seconds that threads and children which are ending get to do so.
PATIENCE_S = 2.0
_LOOK_AGAIN_S = 0.02
KINDS = ("threads", "processes", "files", "tasks")


class Belongings:
    """What the process has now.

    Child processes are seen on Linux only, open files where there is ``/dev/fd``.

    Attributes:
        threads: Names of the library's threads, by thread.
        processes: Command lines of the child processes, by process id.
        files: Targets of the open file descriptors, by number.
    """

    def __init__(self) -> None:
        self.threads = {
            thread: thread.name
            for thread in threading.enumerate()
            if thread.name.startswith("rollout")
        }
        self.processes = _child_processes()
        self.files = _open_files()


def leftovers(before: Belongings, allowed: Collection[str] = ()) -> list[str]:
    """What there is beyond `before`, in words; waits a moment for what is about to end.

    Args:
        allowed: Kinds that may stay: "threads", "processes", "files".
    """
    for attempt in range(round(PATIENCE_S / _LOOK_AGAIN_S)):
        found = _found(before, allowed)
        if not found:
            break
        if attempt == 1:  # most end by themselves at once, and a collection may take a second
            gc.collect()
        threading.Event().wait(_LOOK_AGAIN_S)
    return found


def _found(before: Belongings, allowed: Collection[str]) -> list[str]:
    now = Belongings()
    threads = [now.threads[thread] for thread in now.threads.keys() - before.threads.keys()]
    # By id: one that was there before, and ended since, is still its parent's to reap.
    processes = sorted(now.processes.keys() - before.processes.keys())
    files = sorted(now.files.items() - before.files.items())
    found = []
    if "threads" not in allowed:
        found += [f"thread {name}" for name in sorted(threads)]
    if "processes" not in allowed:
        lines = [(pid, now.processes[pid]) for pid in processes]
        found += [f"child process {pid} ({s})" for pid, s in lines if "resource_tracker" not in s]
    if "files" not in allowed and len(now.files) > len(before.files):
        found += [f"open file {number} ({target})" for number, target in files]
    return found


def _child_processes() -> dict[int, str]:
    pids: list[int] = []
    with suppress(ChildProcessError, AttributeError):  # none, as mostly; no Linux
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        for listing in Path("/proc/self/task").glob("*/children"):
            with suppress(OSError):  # that thread has just ended
                pids += map(int, listing.read_text().split())
    return {pid: _command_line(pid) for pid in pids}


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip() or "ended"
    except OSError:
        return "ended"


def _open_files() -> dict[int, str]:
    """Descriptors and what they lead to; devices, which libraries keep open, are left out."""
    files = {}
    try:
        numbers = os.listdir("/dev/fd")
    except OSError:
        return {}
    for number in numbers:
        try:
            target = os.readlink(f"/dev/fd/{number}")
        except OSError:  # the one that the listing itself needed
            continue
        if not target.startswith("/dev/"):
            files[int(number)] = target
    return files
