"""Whose code a frame is, and the line that tells people where code waits or failed."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

LIBRARY = __name__.partition(".")[0]
STDLIB = os.path.dirname(os.__file__) + os.sep
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: Packages that run the code of others, or that this library waits in: their lines explain nothing.
_LOOPS = {"anyio", "asyncio", "concurrent", "outcome", "sniffio", "trio"}
_AWAITED = {*_LOOPS, "httpx", "httpcore", "mcp"}


def is_user_frame(frame: FrameType) -> bool:
    """Whether its file was not installed, and is none of this library's."""
    return not (_is_installed(frame) or is_library_frame(frame))


def _is_installed(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith((STDLIB, "<frozen")) or any(part in path for part in INSTALLED)


def is_library_frame(frame: FrameType) -> bool:
    """Whether it is of this library's code."""
    return root_module(frame) == LIBRARY


def module_name(frame: FrameType) -> str:
    """The module that its code is of."""
    return str(frame.f_globals.get("__name__", ""))


def root_module(frame: FrameType) -> str:
    """The package that its code is of."""
    return module_name(frame).partition(".")[0]


def describe_place(frames: Sequence[FrameType]) -> str:
    """File and line where code waits that has these frames, the outermost first.

    It is the innermost line of a user's, else the innermost of the outermost installed package that
    is no event loop, else of this library.
    """
    users = [frame for frame in frames if is_user_frame(frame)]
    foreign = [
        frame
        for frame in frames
        if root_module(frame) not in _AWAITED
        and _is_installed(frame)
        and not (is_library_frame(frame) or frame.f_code.co_filename.startswith(STDLIB))
    ]
    packages = [frame for frame in foreign if root_module(frame) == root_module(foreign[0])]
    ours = [frame for frame in frames if is_library_frame(frame)]
    for chosen in (users, packages, ours):
        if chosen:
            return f"{chosen[-1].f_code.co_filename}:{chosen[-1].f_lineno}"
    return f"{frames[0].f_code.co_qualname} of {module_name(frames[0])}" if frames else "its start"


def format_user_frames(error: BaseException) -> list[str]:
    """An error's frames as Python shows them, from the user's first one in; none of an event loop.

    All but the loops' where no code of a user is among them.
    """
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if root_module(frame) not in _LOOPS
    ]
    starts = (at for at, (frame, _) in enumerate(frames) if is_user_frame(frame))
    return traceback.StackSummary.extract(iter(frames[next(starts, 0) :])).format()
