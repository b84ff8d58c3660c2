"""Which code blocks the event loop, by the frames of its thread."""

from __future__ import annotations

import traceback
from itertools import takewhile
from typing import TYPE_CHECKING

import attrs

from rollout.wait_places import (
    LIBRARY,
    is_library_frame,
    is_user_frame,
    root_module,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

#: Functions on the way to user code hold what they are doing in a local variable of this name: a
#: text, or what becomes one.
ACTIVITY = "activity"
#: And in this one, what the author of the code can do about it.
REMEDY = "remedy"
#: Event loops: their outermost frames in a task only run it.
LOOPS = ("asyncio", "trio", "anyio", "uvloop")
#: Their functions that run tasks and wait for the next event.
LOOP_FUNCTIONS = ("run", "unrolled_run", "_run_once")


@attrs.frozen
class BlockingCode:
    """Code that blocks the loop.

    Attributes:
        text: For people: whose code, doing what, with file and line, and the remedy.
        place: The function of theirs, whichever trajectory called it and at whichever line it is.
        remedy: What its author can do about it, where that is known.
    """

    text: str
    place: tuple[str, str]
    remedy: str = ""


def find_blocking_code(innermost: FrameType) -> BlockingCode | None:
    """The code that blocks the loop whose thread is at this frame; None between its tasks.

    Names the activities from the outermost in, else whether it is the caller's code or this
    library's; then the innermost line, and the nearest one of a file that was not installed.
    """
    frames = _frames_of_task(innermost)
    if not frames:
        return None
    own = _own(frames)
    place = _line(innermost)
    if own is not innermost:
        place += f", called from {_line(own)}"
    remedy = next(iter(_told(innermost, REMEDY)), "")
    text = f"{_who(innermost, own)} at {place}" + (f"; {remedy}" if remedy else "")
    return BlockingCode(text, _place(own.f_code), remedy)


def is_running(innermost: FrameType, activity: str) -> bool:
    """Whether the thread at this frame is in code that this library does as `activity`."""
    return activity in _told(innermost, ACTIVITY)


def stack_of_task(innermost: FrameType) -> str:
    """The stack of the task that runs at this frame, as Python prints one; empty between tasks."""
    frames = [(frame, frame.f_lineno) for frame in reversed(_frames_of_task(innermost))]
    return "".join(traceback.StackSummary.extract(iter(frames)).format())


def _frames_of_task(innermost: FrameType) -> list[FrameType]:
    """From the innermost one out, without the loop's; none between tasks."""
    frames = list(takewhile(lambda frame: not _runs_tasks(frame), _outwards(innermost)))
    while frames and root_module(frames[-1]) in (*LOOPS, "selectors"):
        frames.pop()
    return frames


def _outwards(frame: FrameType) -> Iterator[FrameType]:
    at: FrameType | None = frame
    while at is not None:
        yield at
        at = at.f_back


def _own(frames: list[FrameType]) -> FrameType:
    """The innermost frame of this library or of a file that was not installed.

    Where all of the task is installed code, a trainer that is a package, its outermost frame.
    """
    return next(
        (frame for frame in frames if is_library_frame(frame) or is_user_frame(frame)), frames[-1]
    )


def _who(innermost: FrameType, own: FrameType) -> str:
    doing = _told(innermost, ACTIVITY)
    if doing:
        return ", ".join(reversed(doing))
    return f"{LIBRARY}'s own work" if is_library_frame(own) else "the caller's own code"


def _told(innermost: FrameType, name: str) -> list[str]:
    """The values of local variables of this name in frames of this library, from within."""
    return [
        str(value)
        for frame in _outwards(innermost)
        if is_library_frame(frame) and (value := frame.f_locals.get(name)) is not None
    ]


def _runs_tasks(frame: FrameType) -> bool:
    return root_module(frame) in LOOPS and frame.f_code.co_name in LOOP_FUNCTIONS


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _place(code: CodeType) -> tuple[str, str]:
    return code.co_filename, code.co_qualname
