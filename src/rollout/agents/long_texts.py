"""Work on texts: short ones where they stand, long ones in a thread beside the event loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import msgspec

from rollout.chat.tokenizer_backend import LONG
from rollout.worker_threads import WorkerThreads, may_leave_loop

T = TypeVar("T")

_TEXTS = (str, bytes, bytearray)
_COLLECTIONS = (list, tuple, dict, Collection)  # the last one takes longest
#: A message, or part of one, takes as long as so many characters at least.
_OVERHEAD = 16
#: By what threads that were left behind are counted.
NAME = "rollout.chat"


async def run_text(
    thread: WorkerThreads, is_much: bool, function: Callable[..., T], *args: object
) -> T:
    """``function(*args)``, in the thread where it is long work; cancellation leaves it behind.

    Rendering and encoding a megabyte takes a quarter of a second. What is left behind is bounded,
    as texts for which there is no room are given up early.
    """
    if not is_much or not may_leave_loop():
        return function(*args)
    return await thread.run(NAME, function, *args)


def is_long(value: object, room: int = LONG) -> bool:
    """Whether the texts in `value` have more than `room` characters; looks at no more of them."""
    return room_beside(value, room) < 0


def room_beside(value: object, room: int = LONG) -> int:
    """Characters that the texts in `value` leave of `room`; negative where they are more."""
    waiting: list[object] = [value]
    for item in waiting:  # which grows meanwhile
        if isinstance(item, _TEXTS):
            room -= len(item)
        elif item is not None:
            room -= _OVERHEAD
            if isinstance(item, msgspec.Struct):
                waiting += msgspec.structs.astuple(item)
            elif isinstance(item, _COLLECTIONS) and getattr(item, "shape", None) != ():
                room -= _OVERHEAD * len(item)
                if room >= 0:
                    waiting.extend(item)
                    waiting.extend(item.values() if isinstance(item, Mapping) else ())
        if room < 0:
            break
    return room
