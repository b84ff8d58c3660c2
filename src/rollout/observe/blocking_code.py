"""Which code blocks the event loop, by the frames of its thread."""

from __future__ import annotations

import os
import traceback
from itertools import takewhile
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

#: Functions on the way to user code hold what they are doing in a local variable of this name: a
#: text, or what becomes one.
ACTIVITY = "activity"
#: Modules of the loops themselves. A thread in them, and in nothing deeper, is between two tasks or
#: asleep until the next event.
LOOP_MODULES = ("asyncio.base_events", "asyncio.runners", "trio._core", "uvloop", "anyio._backends")
#: Packages whose outermost frames in a task only run it.
TASK_RUNNERS = ("asyncio", "trio", "anyio")
LIBRARY = __name__.partition(".")[0]
STDLIB = os.path.dirname(os.__file__) + os.sep
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@attrs.frozen
class BlockingCode:
    """Code that blocks the loop.

    Attributes:
        text: For people: whose code, doing what, with file and line.
        place: The function of theirs, whichever trajectory called it and at whichever line it is.
    """

    text: str
    place: tuple[str, str]


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
    return BlockingCode(f"{_who(innermost, own)} at {place}", _place(own.f_code))


def stack_of_task(innermost: FrameType) -> str:
    """The stack of the task that runs at this frame, as Python prints one; empty between tasks."""
    frames = [(frame, frame.f_lineno) for frame in reversed(_frames_of_task(innermost))]
    return "".join(traceback.StackSummary.extract(iter(frames)).format())


def _frames_of_task(innermost: FrameType) -> list[FrameType]:
    """From the innermost one out, without the loop's; none between tasks."""
    frames = list(takewhile(lambda frame: not _is_loop(frame), _outwards(innermost)))
    if all(_module(frame) == "selectors" for frame in frames):
        return []
    while len(frames) > 1 and _root(frames[-1]) in TASK_RUNNERS:
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
    return next((frame for frame in frames if _is_library(frame) or _is_user(frame)), frames[-1])


def _who(innermost: FrameType, own: FrameType) -> str:
    doing = [
        str(activity)
        for frame in _outwards(innermost)
        if _is_library(frame) and (activity := frame.f_locals.get(ACTIVITY)) is not None
    ]
    if doing:
        return ", ".join(reversed(doing))
    return f"{LIBRARY}'s own work" if _is_library(own) else "the caller's own code"


def _is_loop(frame: FrameType) -> bool:
    return _module(frame).startswith(LOOP_MODULES)


def _is_library(frame: FrameType) -> bool:
    return _root(frame) == LIBRARY


def _is_user(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    is_installed = path.startswith((STDLIB, "<frozen")) or any(part in path for part in INSTALLED)
    return not is_installed


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _root(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _place(code: CodeType) -> tuple[str, str]:
    return code.co_filename, code.co_qualname
