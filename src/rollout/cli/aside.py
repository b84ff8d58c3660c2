"""Files of an earlier run that wait beside their place until this one has results."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def aside_of(path: Path) -> Path:
    """Where a file waits."""
    return path.with_name(f"{path.name}.before")


def set_aside(path: Path) -> None:
    """Have a file wait."""
    path.replace(aside_of(path))


def settle(path: Path, *, has_results: bool) -> None:
    """Give up the file that waits, or put it back in its place where this run has no results."""
    with suppress(FileNotFoundError):  # as a rule none does
        if has_results:
            aside_of(path).unlink()
        else:
            aside_of(path).replace(path)
