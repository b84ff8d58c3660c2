"""The processes below a sandbox's supervisor, as /proc lists them."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessFacts(NamedTuple):
    """One process: its state's letter, threads, CPU seconds (ended children too) and memory."""

    pid: int
    state: str
    threads: int
    cpu_s: float
    memory: int


def descendants(pid: int) -> list[ProcessFacts]:
    """Every process below `pid`; one that ends meanwhile is left out."""
    found: list[ProcessFacts] = []
    waiting = _children(pid)
    while waiting:
        child = waiting.pop()
        facts = _facts(child)
        if facts is not None:
            found.append(facts)
            waiting += _children(child)
    return found


def signal_descendants(pid: int, number: int, spared: Collection[int] = ()) -> None:
    """Send SIGSTOP or SIGKILL to all below `pid`, `spared` apart, and to what they just started.

    One that was sent either starts no more processes, so a look that finds none is the last.
    """
    sent = set(spared)
    while fresh := [p for p in descendants(pid) if p.pid not in sent and p.state != "Z"]:
        _signal(fresh, number)
        sent.update(process.pid for process in fresh)


def thaw_descendants(pid: int, spared: Collection[int]) -> None:
    """Let what was stopped continue, or was about to stop."""
    _signal([process for process in descendants(pid) if process.pid not in spared], signal.SIGCONT)


def end_descendants() -> None:
    """Kill all below this process, which is the parent of their orphans, and see them gone."""
    while True:
        signal_descendants(os.getpid(), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _signal(processes: list[ProcessFacts], number: int) -> None:
    for process in processes:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue


def disk_use(directory: str) -> int:
    """Bytes of the files beneath a directory, an empty one counted as a page."""
    total, waiting = 0, [directory]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    total += max(entry.stat(follow_symlinks=False).st_blocks * 512, _PAGE)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:  # removed meanwhile, or closed to us: found at the next look, or small
            continue
    return total


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as listing:
                found += map(int, listing.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def _facts(pid: int) -> ProcessFacts | None:
    """The fields of /proc/PID/stat, see proc(5); counted from the end of the name."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ProcessFacts(
        pid=pid,
        state=fields[0],
        threads=int(fields[17]),
        cpu_s=sum(map(int, fields[11:15])) / _TICKS_PER_S,
        memory=int(fields[21]) * _PAGE,
    )
