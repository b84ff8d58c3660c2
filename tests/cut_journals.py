"""Journals as a death leaves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rollout.scheduling.journal.entries import EndEntry
from rollout.scheduling.journal.frames import Frame, FrameBuffer, frames, records_of
from rollout.scheduling.journal.journal_reading import entries_of

if TYPE_CHECKING:
    from pathlib import Path


def cut_before_end(path: Path) -> None:
    """As a death leaves it right before its first trajectory was finished."""
    data = path.read_bytes()
    for each in frames(memoryview(data)):
        if isinstance(each, Frame):
            for payload, entry in entries_of(each):
                if isinstance(entry, EndEntry):
                    before = [
                        msgspec.Raw(record)
                        for start, record in records_of(each)
                        if start < payload.start
                    ]
                    frame = FrameBuffer()
                    frame.fill(before)
                    path.write_bytes(data[: each.start] + frame.head + frame.payload)
                    return
