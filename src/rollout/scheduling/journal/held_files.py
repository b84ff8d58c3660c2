"""Files whose locks end with this process, whatever children it has forked.

A lock of `flock` belongs to the open file, and that is open as long as in one process: the worker
of a data loader, say, which lives on for a while after its parent was killed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from rollout.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_held: set[int] = set()


def hold(descriptor: int) -> None:
    """A child that is forked from now on has it closed."""
    _held.add(descriptor)


def let_go(descriptor: int) -> None:
    """It is about to be closed."""
    _held.discard(descriptor)


def opening_error(path: Path, error: OSError) -> ConfigError:
    """Why a journal cannot be opened, or locked."""
    why = "another runtime writes it" if isinstance(error, BlockingIOError) else error.strerror
    return ConfigError(f"journal.path = {str(path)!r}: cannot be opened: {why}")


def _leave_child() -> None:
    while _held:
        with suppress(OSError):
            os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_child)
