"""What memory there is for this process."""

from __future__ import annotations

import os
from pathlib import Path

#: The control group of this process, as a container shows it.
_CGROUP = Path("/sys/fs/cgroup")


def total_bytes() -> int:
    """The memory of this machine, or of a container with less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int((_CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):  # there is no container, or no limit ("max")
        return machine
