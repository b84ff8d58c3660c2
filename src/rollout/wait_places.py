"""Whose code a frame is, and the line that tells people where code waits or failed."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from threading import Thread
    from types import FrameType

LIBRARY = __name__.partition(".")[0]
STDLIB = os.path.dirname(os.__file__) + os.sep
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: Packages that run the code of others, or that this library waits in: their lines explain nothing.
_LOOPS = {"anyio", "asyncio", "concurrent", "outcome", "sniffio", "trio"}
_AWAITED = {*_LOOPS, "httpx", "httpcore", "mcp", LIBRARY}
#: Of any error, whatever its class puts in their place.
get_cause: Any = BaseException.__dict__["__cause__"].__get__
get_traceback: Any = BaseException.__dict__["__traceback__"].__get__


def is_user_frame(frame: FrameType) -> bool:
    """Whether its file was not installed, and is none of this library's."""
    is_of_python = frame.f_code.co_filename.startswith((STDLIB, "<frozen"))
    return not (is_of_python or _is_installed(frame) or is_library_frame(frame))


def _is_installed(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in INSTALLED)


def is_library_frame(frame: FrameType) -> bool:
    """Whether it is of this library's code."""
    return root_module(frame) == LIBRARY


def root_module(frame: FrameType) -> str:
    """The package that its code is of."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def find_frames(coroutine: Any) -> list[FrameType]:
    """The frames of what waits for each other, from this coroutine in; also of a running one.

    They end where an async generator is iterated: Python does not say what such a step waits for.
    """
    frames: list[FrameType] = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            frames.append(frame)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return frames


def find_thread_frames(thread: Thread | None) -> list[FrameType]:
    """Where a thread is, from the outermost frame in."""
    frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
    return [each for each, _ in traceback.walk_stack(frame)][::-1] if frame else []


def describe_place(frames: Sequence[FrameType]) -> str:
    """File and line where code waits that has these frames, the outermost first.

    It is the innermost line of a user's, else of an installed package that waits for no other, else
    of this library.
    """
    for is_telling in (is_user_frame, _is_of_package, is_library_frame, bool):
        for frame in reversed(frames):
            if is_telling(frame):
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "its start"


def _is_of_package(frame: FrameType) -> bool:
    return _is_installed(frame) and root_module(frame) not in _AWAITED


def format_user_frames(error: BaseException) -> list[str]:
    """An error's frames as Python shows them, from the user's first one in; none of an event loop.

    All but the loops' where no code of a user is among them.
    """
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(get_traceback(error))
        if root_module(frame) not in _LOOPS
    ]
    starts = (at for at, (frame, _) in enumerate(frames) if is_user_frame(frame))
    return traceback.StackSummary.extract(iter(frames[next(starts, 0) :])).format()
