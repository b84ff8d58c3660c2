"""Removes what SGLang puts into shared memory and leaves there: its loads, semaphores and more."""

from __future__ import annotations

import multiprocessing
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Where files are in memory.
DIRECTORY = "/dev/shm"


def list_shared_files() -> set[str]:
    """Paths of all files in shared memory."""
    try:
        return {entry.path for entry in os.scandir(DIRECTORY)}
    except OSError:
        return set()


def list_mapped_files(pids: Iterable[int]) -> set[str]:
    """Those that these processes use, by inode: a semaphore had another name when it was mapped."""
    used: set[int] = set()
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            lines = (line.split(maxsplit=5) for line in maps if DIRECTORY.encode() in line)
            used |= {int(inode) for _, _, _, _, inode, _ in lines}
    return {path for path in list_shared_files() if _read_inode(path) in used}


def remove_files(paths: Iterable[str]) -> None:
    """Remove files; what is gone already does no harm."""
    for path in paths:
        with suppress(OSError):
            os.unlink(path)


class SharedFiles:
    """What this process and its children have put there since this was made."""

    def __init__(self) -> None:
        self._before = list_shared_files()
        self._noted: set[str] = set()

    def note(self) -> None:
        """Take up what is used now; what has ended later uses nothing that could be found."""
        children = [process.pid for process in multiprocessing.active_children()]
        self._noted |= list_mapped_files([os.getpid(), *filter(None, children)]) - self._before

    def remove(self) -> None:
        """Remove it; SGLang has ended."""
        self.note()
        remove_files(self._noted)


def _read_inode(path: str) -> int:
    try:
        status = os.lstat(path)
    except OSError:
        return -1
    return status.st_ino if stat.S_ISREG(status.st_mode) else -1
