"""Records that no frame can hold."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rollout.scheduling.journal.entries import TurnEntry
from rollout.scheduling.journal.frames import FrameBuffer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rollout.scheduling.journal.entries import Entry

logger = logging.getLogger("rollout.journal")


def single_frames(records: Iterable[Entry]) -> Iterator[FrameBuffer]:
    """A frame for each record; an empty one for a record that is larger than any frame.

    Prompts and ended trajectories were measured as they were packed, and turns are small: it is
    what a tool answered, or an image or video, that is left out.
    """
    for record in records:
        frame = FrameBuffer()
        frame.fill([record])
        if frame.is_too_large and isinstance(record, TurnEntry):
            frame = _left_out(frame, [replace(record, answers=None)])
        if frame.is_too_large:
            frame = _left_out(frame, [])
        yield frame


def _left_out(large: FrameBuffer, rest: list[Entry]) -> FrameBuffer:
    logger.error(
        "a record of %d bytes is larger than a frame can be, and is not in the journal: a resumed "
        "trajectory asks for it again",
        len(large.payload),
    )
    frame = FrameBuffer()
    frame.fill(rest)
    frame.count = large.count
    return frame
