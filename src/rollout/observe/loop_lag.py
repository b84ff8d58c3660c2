"""Notices when something blocks the event loop, and says what.

A task ticks on the loop; a watchdog thread looks at the ticks. When one is overdue, the thread
samples the stack of the loop's thread and logs which code is in the way: every engine waits
meanwhile. A loop that is late because the machine did not run its thread is no code's fault. What
is logged and what is measured are one judgement: the lag is past `BLOCKED_S` where a line was due.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Hashable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import attrs

from rollout.clocks import monotonic, process_cpu, thread_cpu
from rollout.observe.blocking_code import find_blocking_code
from rollout.observe.event_stream import EventStream
from rollout.observe.events import LoopBlocked

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("rollout.observe")

#: A loop that does not come round for this long is blocked.
BLOCKED_S = 0.1
TICK_S = 0.025
#: One place is named at most this often.
REPEAT_S = 60.0
#: While it goes on blocking the loop it is named again after so long, and then every `REPEAT_S`.
AGAIN_S = (1.0, 5.0, 30.0)
#: What blocked it where no single piece of code did.
GARBAGE = "Python collected garbage for %.2f s (scheduling.freeze_heap makes that rare)"
BUSY = "many short tasks ran one after the other for %.2f s"
THREADS = "other threads computed and held Python's interpreter lock for %.2f s"
NOT_RUN = (
    "the machine did not run the event loop's thread for %.2f s: too many programs want a CPU, or "
    "the process was stopped"
)


class ThreadTimes:
    """What Linux says of a thread of this process; 0 and False once it has ended, or elsewhere.

    It is to be closed before the thread's number can be another's.
    """

    def __init__(self, native_id: int | None = None) -> None:
        number = threading.get_native_id() if native_id is None else native_id
        self._stat = _open_task_file(number, "stat")
        self._schedstat = _open_task_file(number, "schedstat")

    @property
    def cpu_s(self) -> float:
        """Seconds that it ran, exact to a few milliseconds."""
        return self._times()[0]

    @property
    def waited_s(self) -> float:
        """Seconds that it could have run and had no CPU; a wait counts when it is over."""
        return self._times()[1]

    @property
    def wants_cpu(self) -> bool:
        """Whether it runs or waits for a CPU now; False while it sleeps in a call."""
        # The name, in parentheses, may contain anything.
        return _read(self._stat).rpartition(b")")[2].lstrip().startswith(b"R")

    def close(self) -> None:
        """Let go of the files."""
        for file in (self._stat, self._schedstat):
            if file is not None:
                os.close(file)
        self._stat = self._schedstat = None

    def _times(self) -> tuple[float, float]:
        ran, waited, *_ = _read(self._schedstat).split() or (0, 0)
        return int(ran) / 1e9, int(waited) / 1e9


def _read(file: int | None) -> bytes:
    """What the file says; nothing where there is none, or its thread has ended."""
    try:
        return b"" if file is None else os.pread(file, 512, 0)
    except ProcessLookupError:
        return b""


def _open_task_file(number: int, name: str) -> int | None:
    try:
        return os.open(f"/proc/self/task/{number}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


@attrs.define(eq=False)
class LagWindow:
    """The longest delays of the loop while the window was open; None before the first tick.

    Attributes:
        blocked_s: By what this process did.
        starved_s: Because the machine did not run the loop's thread.
    """

    blocked_s: float | None = None
    starved_s: float | None = None

    def take(self, blocked_s: float, starved_s: float) -> None:
        """Keep the longest of each."""
        self.blocked_s = max(self.blocked_s or 0.0, blocked_s)
        self.starved_s = max(self.starved_s or 0.0, starved_s)

    @property
    def metrics(self) -> dict[str, float]:
        """The delays that are known, by the names that they have in `RolloutBatch.metrics`."""
        pairs = {"loop_lag_s/max": self.blocked_s, "loop_starved_s/max": self.starved_s}
        return {name: value for name, value in pairs.items() if value is not None}


@attrs.define(eq=False)
class _Period:
    """From one tick of the loop to the next; the first to claim it says why it was late.

    Attributes:
        began: When the tick was.
        waited_s, loop_waited_s, loop_cpu_s, process_cpu_s: Readings of the clocks then.
        cause: What the watchdog saw in the way.
        warnings: How often the watchdog has said so, or could have.
    """

    began: float
    waited_s: float
    loop_waited_s: float
    loop_cpu_s: float
    process_cpu_s: float
    cause: str = ""
    warnings: int = 0
    _claimed: threading.Lock = attrs.field(init=False, factory=threading.Lock)

    @classmethod
    def now(cls, waited_s: float, loop_waited_s: float) -> _Period:
        """One that begins now, on the loop."""
        return cls(monotonic(), waited_s, loop_waited_s, thread_cpu(), process_cpu())

    @property
    def late_s(self) -> float:
        """Seconds by which the tick that ends it is late so far."""
        return max(0.0, monotonic() - self.began - TICK_S)

    @property
    def is_warning_due(self) -> bool:
        """Whether the watchdog has to say something, for the first time or again."""
        again = self.warnings - 1
        if again < 0:
            return True
        more = again - len(AGAIN_S) + 1
        return self.late_s >= (AGAIN_S[again] if more <= 0 else AGAIN_S[-1] + more * REPEAT_S)

    def claim(self) -> bool:
        """Whether it has not been claimed before."""
        return self._claimed.acquire(blocking=False)


@attrs.define
class Repeats:
    """Lets one thing be said at most every `REPEAT_S` seconds; counts the times between."""

    _said: dict[Hashable, tuple[float, int]] = attrs.field(factory=dict)

    def unsaid(self, thing: Hashable, now: float) -> int | None:
        """None: it was said too recently. Else how often it has been left unsaid since."""
        said_at, unsaid = self._said.get(thing, (-REPEAT_S, 0))
        if now - said_at < REPEAT_S:
            self._said[thing] = said_at, unsaid + 1
            return None
        self._said[thing] = now, 0
        return unsaid


class LoopLag:
    """Measures how late the loop is, and logs what blocks it for more than `BLOCKED_S`.

    Args:
        events: Takes the delays that are longer.

    Attributes:
        total: The longest delays since the start.
    """

    def __init__(self, events: EventStream | None = None) -> None:
        self._events = EventStream() if events is None else events
        self.total = LagWindow()
        self._windows = {self.total}
        self._repeats = Repeats()
        self._threads: tuple[ThreadTimes, ...] = ()
        self._overslept_s = 0.0
        self._period = _Period(monotonic(), 0.0, 0.0, 0.0, 0.0)
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

    @property
    def blocked_now_s(self) -> float:
        """For how long the loop has not come round, whatever the cause; 0 up to `BLOCKED_S`."""
        if not self._threads or self._stop.is_set():
            return 0.0
        late_s = self._period.late_s
        return late_s if late_s > BLOCKED_S else 0.0

    async def watch(self) -> None:
        """Tick until cancelled; the watchdog thread lives as long."""
        self._start_watchdog()
        gc.callbacks.append(self._note_collection)
        try:
            waited_s = self._waited_s()
            while True:
                self._period = _Period.now(waited_s, self._threads[0].waited_s)
                self._collected_s = 0.0
                await anyio.sleep(TICK_S)
                waited_s = self._explain(self._period)
        finally:
            gc.callbacks.remove(self._note_collection)
            self._stop.set()

    def _start_watchdog(self) -> None:
        loop = threading.get_ident(), ThreadTimes()
        thread = threading.Thread(
            target=self._guard, args=loop, name="rollout-watchdog", daemon=True
        )
        thread.start()
        # Of both threads: the loop waits too while the watchdog holds the interpreter and waits.
        self._threads = loop[1], ThreadTimes(thread.native_id)

    def _waited_s(self) -> float:
        """Seconds since the start in which this process could not run, as far as it is known."""
        return self._overslept_s + sum(thread.waited_s for thread in self._threads)

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

    # On the loop, after the fact.

    def _explain(self, period: _Period) -> float:
        """Measure a period that is over, and say what made it late unless the watchdog has.

        Returns:
            What `_waited_s` said at its end.
        """
        is_unseen, waited_s = period.claim(), self._waited_s()
        late_s, idle_s = period.late_s, waited_s - period.waited_s
        if not is_unseen:  # some code was in the way, however long the watchdog waited beside it
            idle_s = self._threads[0].waited_s - period.loop_waited_s
        blocked_s = max(0.0, late_s - idle_s)
        if is_unseen and blocked_s > BLOCKED_S:
            cause = self._unseen_cause(period, blocked_s)
            if cause is None:
                blocked_s = 0.0
            else:
                period.cause = cause % blocked_s
                self._say_blocked(period.cause, cause)
        starved_s = late_s - blocked_s
        if starved_s > BLOCKED_S and self._repeats.unsaid(NOT_RUN, monotonic()) is not None:
            logger.info(NOT_RUN, starved_s)
        if self._events.is_on:
            self._tell(period.cause, blocked_s, starved_s)
        for window in self._windows:
            window.take(blocked_s, starved_s)
        return waited_s

    def _tell(self, cause: str, blocked_s: float, starved_s: float) -> None:
        now = self._events.now()
        if blocked_s > BLOCKED_S:
            self._events.emit(LoopBlocked(at=now, seconds=blocked_s, cause=cause))
        if starved_s > BLOCKED_S:
            said = NOT_RUN % starved_s
            self._events.emit(LoopBlocked(at=now, seconds=starved_s, cause=said, is_starved=True))

    def _unseen_cause(self, period: _Period, blocked_s: float) -> str | None:
        """What made a period late where no code was seen in the way; None: nothing of ours."""
        if self._garbage_s() > blocked_s / 2:
            return GARBAGE
        if thread_cpu() - period.loop_cpu_s > blocked_s / 2:
            return BUSY
        return THREADS if process_cpu() - period.process_cpu_s > blocked_s / 2 else None

    # In the watchdog's thread, while it happens.

    def _guard(self, loop_thread: int, loop_times: ThreadTimes) -> None:
        try:
            while not self._sleep():
                self._look(self._period, loop_thread, loop_times)
        finally:
            for thread in self._threads:
                thread.close()

    def _sleep(self) -> bool:
        """Wait for the next look; whether it is time to stop.

        A thread that oversleeps without having waited for a CPU, while no thread of the process
        computed, was stopped (a signal, a frozen container, a laptop's lid), and the loop with it.
        """
        began, cpu_s, waited_s = monotonic(), process_cpu(), self._waited_s()
        asked_s = self._until_due()
        is_over = self._stop.wait(asked_s)
        extra_s = monotonic() - began - asked_s - (self._waited_s() - waited_s)
        if extra_s > TICK_S and process_cpu() - cpu_s < extra_s / 2:
            self._overslept_s += extra_s
        return is_over

    def _until_due(self) -> float:
        """Seconds until the loop is blocked if it does not tick; a tick's, where it is already."""
        left_s = self._period.began + TICK_S + BLOCKED_S - monotonic()
        return left_s + TICK_S / 8 if left_s > 0 else TICK_S

    def _look(self, period: _Period, loop_thread: int, loop_times: ThreadTimes) -> None:
        if period.late_s - (self._waited_s() - period.waited_s) <= BLOCKED_S:
            return
        if not period.is_warning_due:
            return
        cause = self._seen_cause(period, loop_thread, loop_times)
        if cause is None or period is not self._period:
            return
        if period.warnings:
            again = f"{cause[0]} (for {period.late_s:.0f} s now)"
            self._say_blocked(again, (cause[1], period.warnings))
        elif period.claim():
            period.cause = cause[0]
            self._say_blocked(*cause)
        period.warnings += 1

    def _seen_cause(
        self, period: _Period, loop_thread: int, loop_times: ThreadTimes
    ) -> tuple[str, Hashable] | None:
        collected_s = self._garbage_s()
        if collected_s > BLOCKED_S / 2:
            return GARBAGE % collected_s, GARBAGE
        # A thread that wants a CPU may have been waiting for one all the time: that shows when it
        # is over.
        if loop_times.wants_cpu and loop_times.cpu_s - period.loop_cpu_s <= BLOCKED_S:
            return None
        frame = sys._current_frames().get(loop_thread)
        blocking = None if frame is None else find_blocking_code(frame)
        return None if blocking is None else (blocking.text, blocking.place)

    def _say_blocked(self, cause: str, place: Hashable) -> None:
        unsaid = self._repeats.unsaid(place, monotonic())
        if unsaid is not None:
            more = f" ({unsaid} more times since this was last said)" if unsaid else ""
            logger.warning("the event loop is blocked: %s%s", cause, more)
