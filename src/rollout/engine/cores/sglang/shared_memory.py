"""Files in shared memory that SGLang's processes use, and leave behind when they are killed.

Loaded in engine processes: imports the standard library only.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Where files are in memory.
SHARED = "/dev/shm"


def shared_files() -> set[str]:
    """What lies in shared memory."""
    try:
        return {f"{SHARED}/{name}" for name in os.listdir(SHARED)}
    except OSError:
        return set()


def mapped_files(pids: Iterable[int]) -> set[str]:
    """What of it these processes use: files, and not those in directories.

    By inode: a semaphore has had another name when it was mapped.
    """
    used: set[int] = set()
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            lines = (line.split(maxsplit=5) for line in maps if b" " + SHARED.encode() in line)
            used |= {int(inode) for _, _, _, _, inode, _ in lines}
    return {path for path in shared_files() if _inode(path) in used}


def _inode(path: str) -> int:
    try:
        status = os.lstat(path)
    except OSError:
        return -1
    return status.st_ino if stat.S_ISREG(status.st_mode) else -1


def remove(paths: Iterable[str]) -> None:
    """Remove files and directories; what is gone already does no harm."""
    for path in paths:
        with suppress(OSError):
            os.unlink(path)
        shutil.rmtree(path, ignore_errors=True)
