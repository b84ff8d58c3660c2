"""SIGUSR1: says on standard error what everything waits for, and what blocks the event loop."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rollout.observe.blocking_code import find_blocking_code, stack_of_task
from rollout.observe.explanation import short_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from rollout.observe.explanation import Explanation

#: What is said before there is anything to explain.
STARTING = "nothing runs so far"
#: How long a thread waits for the main one to answer by itself. Code that Python cannot interrupt
#: (a loop in C) keeps it from that.
PATIENCE_S = 1.0


@contextmanager
def explaining_at_signal(explain: Callable[[], Explanation | None]) -> Iterator[None]:
    """Within the block SIGUSR1 prints what `explain` gives; None says that nothing runs so far.

    Where something blocks the event loop, its stack comes first. Blocks may be nested: the
    innermost one answers. To be used on the main thread.
    """
    if not hasattr(signal, "SIGUSR1"):
        yield
        return
    before = signal.getsignal(signal.SIGUSR1)
    teller = _Teller(explain)
    teller.begin()
    try:
        yield
    finally:
        # First another one answers: what this one reads from is closed then.
        if isinstance(before, _Teller):
            before.begin()
        else:
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, before)
        teller.end()


class _Teller:
    """Answers the signal; on the main thread, or from another where that one cannot.

    Python calls its handlers on the main thread between two steps of its own. Below them
    `faulthandler` has one that the system calls at once. What that writes to a pipe is how a thread
    learns of the signal, and stays there until one of the two answers.
    """

    def __init__(self, explain: Callable[[], Explanation | None]) -> None:
        self._explain = explain
        self._over = threading.Event()
        self._loop = threading.get_ident()
        self._told_of, self._tell = os.pipe()
        os.set_blocking(self._told_of, False)
        os.set_blocking(self._tell, False)
        threading.Thread(target=self._watch, name="rollout-explain", daemon=True).start()

    def begin(self) -> None:
        """It answers from now on."""
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, self)
        faulthandler.register(signal.SIGUSR1, file=self._tell, all_threads=False, chain=True)

    def end(self) -> None:
        """It is asked no more."""
        self._over.set()
        os.close(self._tell)  # wakes the thread

    def __call__(self, _: int, frame: FrameType | None) -> None:
        """On the main thread."""
        if self._take():
            self._say(frame, is_blocked=False)

    def _watch(self) -> None:
        told = select.poll()  # `select.select` takes no descriptor past 1023
        told.register(self._told_of, select.POLLIN)
        while not self._over.is_set():
            told.poll()
            if not self._over.wait(PATIENCE_S) and self._take():
                self._say(sys._current_frames().get(self._loop), is_blocked=True)
        os.close(self._told_of)

    def _take(self) -> bool:
        """Whether there is a signal that nobody has answered; the one who asks does."""
        with suppress(BlockingIOError):
            return bool(os.read(self._told_of, 1 << 16))
        return False

    def _say(self, frame: FrameType | None, *, is_blocked: bool) -> None:
        """Past whatever is being written to the terminal just then."""
        explained: Any = None
        try:
            explained = self._explain()
            text = str(explained or STARTING)
        except Exception as error:  # something was half changed just then: it can be asked again
            text = f"cannot be told now ({type(error).__name__}: {error}); ask again"
        blocked_s = getattr(explained, "blocked_s", 0.0)
        if frame is not None and (is_blocked or blocked_s):
            text = f"{_blocked(frame, blocked_s)}{text}"
        with suppress(OSError):
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{text}\n".encode())


def _blocked(frame: FrameType, seconds: float) -> str:
    """What blocks the loop, and its stack."""
    code = find_blocking_code(frame)
    if code is None:  # between two tasks
        return ""
    since = f" for {short_seconds(seconds)}" if seconds else ""
    return f"the event loop is blocked{since}: {code.text}\n{stack_of_task(frame)}\n"
