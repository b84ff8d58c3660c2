"""How long a batch still takes, where there is ground for saying so."""

from __future__ import annotations

from collections import deque

#: Trajectories that must have ended, and their share of all, before anything is said: those that
#: end first are short.
LEAST, LEAST_SHARE = 8, 0.1
#: The pace is that of the last part of the time so far, and of at least so many seconds.
RECENT_SHARE, RECENT_S = 0.5, 5.0
#: Ends within that time that a pace takes; a pace of fewer is none.
LEAST_RECENT = 3


class TimeLeft:
    """Estimates from the pace at which trajectories end. Owns no clock and no task.

    The last trajectories of a batch are its longest, so that their pace is slower than that before
    them: the estimate grows then, and is withdrawn once nothing ends any more.
    """

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque()
        self._began: float | None = None

    def read(self, now: float, finished: int, total: int) -> float | None:
        """Seconds left at `now`; None where there is no ground for an estimate.

        Args:
            now: Of any clock that never goes back.
            finished: Trajectories that have ended, of `total`.
        """
        self._began = now if self._began is None else self._began
        if not self._ends or self._ends[-1][1] != finished:
            self._ends.append((now, finished))
        since = now - max(RECENT_S, RECENT_SHARE * (now - self._began))
        while len(self._ends) > 1 and self._ends[1][0] <= since:
            self._ends.popleft()
        if finished < max(LEAST, LEAST_SHARE * total) or finished >= total:
            return None
        if now - self._began < RECENT_S:
            return None
        recent = finished - self._ends[0][1]
        seconds = now - max(since, self._ends[0][0])
        if recent < LEAST_RECENT or seconds <= 0:
            return None
        return (total - finished) * seconds / recent


def time_left_words(seconds: float) -> str:
    """``about 40 s left``: no more exact than it is known."""
    if seconds < 10:
        return "some seconds left"
    if seconds < 90:
        return f"about {round(seconds, -1):.0f} s left"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"about {minutes} min left"
    return f"about {minutes / 60:.1f} h left"
