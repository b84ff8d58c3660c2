"""Journals as a death leaves them, and their records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.journal.log_file import HEAD, MAGIC, read_frames
from rollout.journal.records import EndRecord, decode_record

if TYPE_CHECKING:
    from pathlib import Path


def frames_in(path: Path) -> list[tuple[int, bytes]]:
    """Where each whole frame of a journal begins, and its payload."""
    return [(start, payload) for start, payload in read_frames(path) if payload is not None]


def records_in(path: Path) -> list[Any]:
    """The records of a journal."""
    return [decode_record(payload) for _, payload in frames_in(path)]


def record_ends(path: Path) -> list[int]:
    """Where the records of a journal end."""
    return [start + HEAD.size + len(payload) for start, payload in frames_in(path)]


def cut(path: Path, size: int) -> Path:
    """A copy of a journal that a death left with its first bytes."""
    copy = path.with_name(f"cut-{size}")
    copy.write_bytes(path.read_bytes()[:size])
    return copy


def cut_before_end(path: Path) -> None:
    """As a death leaves it right before its first trajectory was finished."""
    size = len(MAGIC)
    for start, payload in frames_in(path):
        if isinstance(decode_record(payload), EndRecord):
            size = start
            break
    path.write_bytes(path.read_bytes()[:size])
