"""What others do to the file of a journal while it is written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def foreign_change(path: Path, descriptor: int, size: int) -> str | None:
    """What makes a file of no use to a resumption; None where nothing does.

    Args:
        path: Where it was opened, absolute.
        descriptor: Of it.
        size: In bytes, as who writes it left it.
    """
    try:
        own = os.fstat(descriptor)
    except OSError:  # a disk that is gone says so when it is written to
        return None
    try:
        there = os.stat(path)
    except OSError:
        there = None
    if there is None or not os.path.samestat(own, there):
        return (
            "was moved, removed or replaced while this runtime writes it: a resumption finds "
            "nothing of what is written from here on, unless the file is put back"
        )
    if own.st_size != size:
        return (
            f"was changed while this runtime writes it: it has {own.st_size} bytes; expected "
            f"{size}. A resumption may refuse it as damaged"
        )
    return None
