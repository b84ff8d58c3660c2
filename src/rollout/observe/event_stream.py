"""The one stream of events of a runtime; its readers are attached."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Protocol

from rollout.bridge import loop_poster
from rollout.clocks import wall
from rollout.observe.events import RunStarted

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from rollout.bridge import Post
    from rollout.observe.events import Event

logger = logging.getLogger("rollout.observe")

#: Of a request, a reward or a call that belongs to no trajectory.
NO_TRAJECTORY = 0


class Reader(Protocol):
    """Gets every event, on the loop, as it happens; it must return at once."""

    def __call__(self, event: Event, subject: Any, /) -> None:
        """Take an event.

        Args:
            event: What happened.
            subject: What it happened to, where readers in this process may look at it: the
                `Trajectory` of a `TrajectoryEnded`, the call and the result of a `ToolEnded`, the
                arguments and the value of a `SpanEnded`.
        """


class EventStream:
    """Takes the events of one runtime to its readers.

    Who has something to tell asks `is_on` first, so that without a reader nothing is made::

        if events.is_on:
            events.emit(ToolStarted(at=events.since_start(now), ...))

    Attributes:
        is_on: Whether anybody reads.
        tells_all: Whether anybody wants all of it. Else only traces are made of it: of what has
            ended in trajectories, and of requests for those of `chosen`.
        chosen: Numbers of the trajectories whose requests are told even so.
        emit: Hands an event to every reader, and what it happened to, which is not kept.
    """

    __slots__ = (
        "_clock",
        "_hearers",
        "_loop",
        "_numbers",
        "_post",
        "_readers",
        "_start",
        "chosen",
        "emit",
        "is_on",
        "tells_all",
    )

    def __init__(self) -> None:
        self.is_on = self.tells_all = False
        self.chosen: set[int] = set()
        self.emit: Callable[..., None] = self._tell
        self._readers: tuple[Reader, ...] = ()
        self._hearers: set[Reader] = set()
        self._loop = 0
        self._post: Post | None = None
        self._clock: Callable[[], float] = _not_started
        self._start = 0.0
        self._numbers = 0

    def start(self, clock: Callable[[], float], **facts: Any) -> None:
        """The run begins now; its readers, which there must be already, are told so.

        Args:
            clock: The event loop's.
            facts: Of the `RunStarted`.
        """
        self._clock, self._start = clock, clock()
        self._loop, self._post = threading.get_ident(), loop_poster()
        if self.is_on:
            self.emit(RunStarted(at=0.0, wall_s=wall(), **facts))

    def emit_from_thread(self, event: Event, subject: Any = None) -> None:
        """`emit`, from whatever thread; from another one than the loop's it happens soon."""
        if threading.get_ident() == self._loop or self._post is None:
            self.emit(event, subject)
        else:
            self._post(lambda: self.emit(event, subject))

    def attach(self, reader: Reader, *, for_traces: bool = False) -> None:
        """Give it all events from now on.

        Args:
            for_traces: It has no use for more than traces are made of: see `tells_all`.
        """
        if not for_traces:
            self._hearers.add(reader)
        self._set((*self._readers, reader))

    def detach(self, reader: Reader) -> None:
        """Give it none any more; harmless where it gets none."""
        self._hearers.discard(reader)
        self._set(tuple(each for each in self._readers if each is not reader))

    def now(self) -> float:
        """Seconds since the start of the run."""
        return self._clock() - self._start

    def since_start(self, at: float) -> float:
        """A time of the loop's clock as seconds since the start of the run."""
        return at - self._start

    def tells_requests(self, trajectory: int) -> bool:
        """Whether anybody wants to know of the requests of this one."""
        return self.tells_all or trajectory in self.chosen

    def new_trajectory(self) -> int:
        """The number of another trajectory."""
        self._numbers += 1
        return self._numbers

    def _set(self, readers: tuple[Reader, ...]) -> None:
        self._readers, self.is_on = readers, bool(readers)
        self.tells_all = bool(self._hearers)

    def _tell(self, event: Event, subject: Any = None) -> None:
        for reader in self._readers:
            try:
                reader(event, subject)
            except Exception:
                logger.exception("a reader of events raised; it is not called again")
                self.detach(reader)


def _not_started() -> float:
    return 0.0
