"""Where code waits, as people are told it: in the user's own line, not within an event loop."""

from __future__ import annotations

import gc
import os
import traceback
from types import AsyncGeneratorType, CoroutineType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Functions on the way to user code hold what they are doing in a local variable of this name: a
#: text, or what becomes one.
ACTIVITY = "activity"
#: Functions that wait for code in another task or thread hold in a local variable of this name what
#: gives the frames of that code.
ELSEWHERE = "elsewhere"
LIBRARY = __name__.partition(".")[0]
STDLIB = os.path.dirname(os.__file__) + os.sep
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: Installed packages that this library waits in: a frame of theirs is not its caller's.
_AWAITED = {"anyio", "trio", "asyncio", "outcome", "httpx", "httpcore", "mcp"}
#: Packages that run the code of others: a line of theirs tells nobody anything.
_LOOPS = {"anyio", "asyncio", "concurrent", "outcome", "sniffio", "trio"}
#: Awaitables in C that do not say for which coroutine or generator they stand.
_OPAQUE = {
    "async_generator_asend",
    "async_generator_athrow",
    "anext_awaitable",
    "coroutine_wrapper",
}


def is_user_frame(frame: FrameType) -> bool:
    """Whether its file was not installed, and is none of this library's."""
    path = frame.f_code.co_filename
    is_installed = path.startswith((STDLIB, "<frozen")) or any(part in path for part in INSTALLED)
    return not (is_installed or is_library_frame(frame))


def is_library_frame(frame: FrameType) -> bool:
    """Whether it is of this library's code."""
    return root_module(frame) == LIBRARY


def module_name(frame: FrameType) -> str:
    """The module that its code is of."""
    return str(frame.f_globals.get("__name__", ""))


def root_module(frame: FrameType) -> str:
    """The package that its code is of."""
    return module_name(frame).partition(".")[0]


def await_frames(awaitable: Any) -> list[FrameType]:
    """The frames of what waits for each other, from this coroutine in; also of a running one."""
    frames: list[Any] = []
    inner = awaitable
    while inner is not None:
        if hasattr(inner, "cr_await"):
            frames.append(inner.cr_frame)
            inner = inner.cr_await
        elif hasattr(inner, "gi_yieldfrom"):
            frames.append(inner.gi_frame)
            inner = inner.gi_yieldfrom
        elif hasattr(inner, "ag_await"):
            frames.append(inner.ag_frame)
            inner = inner.ag_await
        else:
            inner = _behind(inner)
    return [frame for frame in frames if isinstance(frame, FrameType)]


def _behind(awaitable: Any) -> Any:
    """What an awaitable in C stands for, which only the collector of garbage can tell."""
    if type(awaitable).__name__ not in _OPAQUE:
        return None
    known = (CoroutineType, AsyncGeneratorType)
    found = gc.get_referents(awaitable)
    return next((e for e in found if isinstance(e, known) or type(e).__name__ in _OPAQUE), None)


def thread_frames(innermost: FrameType | None) -> list[FrameType]:
    """The frames of a thread, from its outermost in."""
    frames = []
    while innermost is not None:
        frames.append(innermost)
        innermost = innermost.f_back
    return frames[::-1]


def describe_place(frames: Sequence[FrameType]) -> str:
    """File and line where code waits that has these frames, the outermost first.

    It is the innermost line of a user's, else of the installed package whose code it is, else of
    this library, with the function and what that waits for; never one within an event loop.
    """
    ours = [frame for frame in frames if is_library_frame(frame)]
    for frame in reversed(ours):
        if (elsewhere := frame.f_locals.get(ELSEWHERE)) is not None:
            frames = [*frames, *elsewhere()]
            break
    users = [frame for frame in frames if is_user_frame(frame)] or _of_package(frames)
    if users:
        return _line(users[-1])
    ours = [frame for frame in frames if is_library_frame(frame)]
    if not ours:
        return (
            f"{frames[0].f_code.co_qualname} of {module_name(frames[0])}" if frames else "its start"
        )
    doing = [frame.f_locals.get(ACTIVITY) for frame in reversed(ours)]
    what = next((f", which waits for {each}" for each in doing if each is not None), "")
    return f"{_line(ours[-1])} in {ours[-1].f_code.co_qualname}{what}"


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


def _of_package(frames: Sequence[FrameType]) -> list[FrameType]:
    """Those of the outermost package that is neither of Python, nor one that this library uses."""
    foreign = [
        frame
        for frame in frames
        if not is_library_frame(frame)
        and any(part in frame.f_code.co_filename for part in INSTALLED)
        and root_module(frame) not in _AWAITED
    ]
    return [frame for frame in foreign if root_module(frame) == root_module(foreign[0])]


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
