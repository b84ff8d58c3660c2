"""When something was asked of a run: the time between its calls is the trainer's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from rollout.observe.events import BatchEnded, BatchStarted
from rollout.observe.report.trajectory_times import covered

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy.typing as npt

    from rollout.observe.events import Event


@attrs.define
class CallTimes:
    """The calls of a run, by the number of their batch.

    Attributes:
        began, ended: When; one that is open has no end.
        latest: Up to when there are events of an open call, or of the last one.
    """

    began: dict[int, float] = attrs.field(factory=dict)
    ended: dict[int, float] = attrs.field(factory=dict)
    latest: float = 0.0
    _open: set[int] = attrs.field(factory=set)

    def take(self, event: Event) -> None:
        """One more event, of any kind."""
        if isinstance(event, BatchStarted):
            self.began[event.batch] = event.at
            self._open.add(event.batch)
        if self._open:
            self.latest = max(self.latest, event.at)
        if isinstance(event, BatchEnded) and event.batch in self._open:
            self.ended[event.batch] = event.at
            self._open.discard(event.batch)

    def seconds(self, batches: Collection[int]) -> float:
        """In which at least one of these was open."""
        return covered(self._times(batch) for batch in batches if batch in self.began)

    def open_before(self, at: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Seconds before each of these times in which a call was open."""
        edges, sums, until = [0.0], [0.0], float("-inf")
        for start, end in sorted(map(self._times, self.began)):
            if end > until:
                edges += [max(start, until), end]
                sums += [sums[-1], sums[-1] + end - max(start, until)]
                until = end
        return np.interp(at, edges, sums)

    def _times(self, batch: int) -> tuple[float, float]:
        return self.began[batch], self.ended.get(batch, self.latest)
