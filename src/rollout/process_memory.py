"""What memory this process uses, and what there is for it."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")
_MEMINFO = Path("/proc/meminfo")
#: The control group of this process, as a container shows it.
_CGROUP = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Resident memory of this process; where the system does not say, the most that it has had."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def total_bytes() -> int:
    """The memory of this machine, or of a container with less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int((_CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):  # there is no container, or no limit ("max")
        return machine


def available_bytes() -> int:
    """What programs can still take: of the machine, or of a container with less.

    Where the system does not say, a quarter of the machine's memory.
    """
    found = [free for free in (_free_of_machine(), _free_of_container()) if free is not None]
    if found:
        return max(0, min(found))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def _free_of_machine() -> int | None:
    kilobytes = _numbers(_MEMINFO).get("MemAvailable")
    return None if kilobytes is None else kilobytes * 1024


def _free_of_container() -> int | None:
    try:
        most = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # there is no container, or no limit ("max")
        return None
    return most - used + _numbers(_CGROUP / "memory.stat").get("inactive_file", 0)


def _numbers(path: Path) -> dict[str, int]:
    """The numbers of a file with lines like ``MemAvailable:   123 kB`` by name."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) > 1}
