"""Notices when something blocks the event loop, and says what.

A task ticks on the loop; a watchdog thread looks at the ticks. When one is overdue, the thread
samples the stack of the loop's thread and logs who is in the way: every engine waits meanwhile.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import attrs

from rollout.observe.clocks import monotonic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

logger = logging.getLogger("rollout.observe")

#: A loop that does not come round for this long is blocked.
BLOCKED_S = 0.1
TICK_S = 0.025
#: What blocked it where nobody's code did.
GARBAGE = "Python collected garbage for %.2f s (scheduling.freeze_heap makes that rare)"
#: Functions on the way to user code hold what they are doing in a local variable of this name.
ACTIVITY = "activity"


@attrs.define(eq=False)
class LagWindow:
    """The longest delay of the loop while the window was open; None before the first tick."""

    max_s: float | None = None


class LoopLag:
    """Measures how late the loop is, and logs what blocks it for more than `BLOCKED_S`."""

    def __init__(self) -> None:
        self.max_s = 0.0
        self._windows: set[LagWindow] = set()
        self._last_tick = monotonic()
        self._collecting_since: float | None = None
        self._collected_s = 0.0
        self._stop = threading.Event()

    @contextmanager
    def window(self) -> Iterator[LagWindow]:
        """The lag of one batch."""
        window = LagWindow()
        self._windows.add(window)
        try:
            yield window
        finally:
            self._windows.discard(window)

    async def watch(self) -> None:
        """Tick until cancelled; the watchdog thread lives as long."""
        self._last_tick = monotonic()
        loop_thread = threading.get_ident()
        threading.Thread(
            target=self._guard, args=(loop_thread,), name="rollout-watchdog", daemon=True
        ).start()
        gc.callbacks.append(self._note_collection)
        try:
            while True:
                await anyio.sleep(TICK_S)
                now = monotonic()
                self._record(max(0.0, now - self._last_tick - TICK_S))
                self._last_tick, self._collected_s = now, 0.0
        finally:
            gc.callbacks.remove(self._note_collection)
            self._stop.set()

    def _note_collection(self, phase: str, _info: object) -> None:
        """Python's garbage collector stops every thread, the watchdog's too."""
        if phase == "start":
            self._collecting_since = monotonic()
        else:
            self._collected_s = self._garbage_s()
            self._collecting_since = None

    def _garbage_s(self) -> float:
        """What collections have taken since the last tick; finalizers let other threads run."""
        since = self._collecting_since
        return self._collected_s + (0.0 if since is None else monotonic() - since)

    def _record(self, lag_s: float) -> None:
        self.max_s = max(self.max_s, lag_s)
        for window in self._windows:
            window.max_s = max(window.max_s or 0.0, lag_s)

    def _guard(self, loop_thread: int) -> None:
        reported = 0.0
        while not self._stop.wait(TICK_S):
            tick = self._last_tick
            if monotonic() - tick > BLOCKED_S and tick != reported:
                reported = tick
                collected_s = self._garbage_s()
                frame = sys._current_frames().get(loop_thread)
                if collected_s > BLOCKED_S / 2:
                    logger.warning("the event loop is blocked: %s", GARBAGE % collected_s)
                elif frame is not None:
                    logger.warning("the event loop is blocked: %s", describe(frame))


def describe(frame: FrameType) -> str:
    """Who is in the way: activities from the outermost in, then file and line of the innermost."""
    doing: list[str] = []
    at: FrameType | None = frame
    while at is not None:
        activity = at.f_locals.get(ACTIVITY)
        if isinstance(activity, str):
            doing.insert(0, activity)
        at = at.f_back
    place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    own = _nearest_user_frame(frame)
    if own is not frame:
        place += f", called from {own.f_code.co_filename}:{own.f_lineno} in {own.f_code.co_name}"
    return f"{', '.join(doing) or 'no trajectory'} at {place}"


def _nearest_user_frame(frame: FrameType) -> FrameType:
    """The innermost frame that is neither in the standard library nor in an installed package."""
    at: FrameType | None = frame
    while at is not None:
        path = at.f_code.co_filename
        if "site-packages" not in path and not path.startswith((sys.base_prefix, "<frozen")):
            return at
        at = at.f_back
    return frame
