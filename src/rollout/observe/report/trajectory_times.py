"""What a trajectory did when."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable

#: What a trajectory does in an interval; the page has their names and colours.
PLACE, QUEUE, PREFILL, DECODE = "place", "queue", "prefill", "decode"
TOOL, USER, REWARD, SPAN, OTHER = "tool", "user", "reward", "span", "other"
#: Those that make up its time, from its place on.
SPENT = (QUEUE, PREFILL, DECODE, TOOL, USER, REWARD)
#: Digits of a rounded second: a tenth of a millisecond.
DIGITS = 4


class Interval(NamedTuple):
    """Part of a trajectory's time, in seconds of the run.

    Attributes:
        label: The replica or the tool.
        turn: From 1, of the conversation `path`; None where it belongs to none.
        note: What else there is to say.
    """

    phase: str
    start: float
    end: float
    label: str = ""
    turn: int | None = None
    note: str = ""
    path: str = ""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start


@attrs.define
class TrajectoryTimes:
    """One trajectory.

    Attributes:
        name: ``uid/member``.
        step, validate, batch: What it was asked for, and the call that it ended in, or began.
        began, ended: None where that is not known, or has not come yet.
        ending: Its outcome and its sampled tokens; None before.
        carried: Seconds for which it waited to be carried to another call, by conversation.
    """

    name: str
    step: int | None = None
    validate: bool = False
    batch: int | None = None
    began: float | None = None
    ended: float | None = None
    ending: tuple[str, int] | None = None
    intervals: list[Interval] = attrs.field(factory=list)
    carried: dict[str, float] = attrs.field(factory=dict)

    @property
    def replicas(self) -> list[str]:
        """Those that worked for it."""
        return sorted({each.label for each in self.intervals if each.phase == DECODE})

    def spent(self, until: float) -> dict[str, float]:
        """Seconds of each phase from its place on; what runs at once counts once.

        The time for which it was carried is none of it: all of its conversations wait then.
        """
        if self.began is None:
            return {}
        parts: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for each in self.intervals:
            if each.phase in SPENT:
                parts[each.phase].append((each.start, each.end))
        seconds = {phase: covered(found) for phase, found in parts.items()}
        whole = (until if self.ended is None else self.ended) - self.began
        known = covered(each for found in parts.values() for each in found)
        carried = max(self.carried.values(), default=0.0)
        return {**seconds, OTHER: max(0.0, whole - known - carried)}


def covered(pairs: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of these, each from its start to its end."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(pairs):
        if end > until:
            total += end - max(start, until)
            until = end
    return total
