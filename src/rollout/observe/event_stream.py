"""The one stream of events of a runtime; its readers are attached."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Protocol

from rollout.bridge import loop_poster
from rollout.clocks import wall
from rollout.observe.events import RunStarted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Any

    from rollout.bridge import Post
    from rollout.observe.events import Event

    #: Of the start of the run on the loop's clock, and of facts, an event and its subject.
    Make = Callable[[float, Sequence[Any]], tuple[Event, Any]]

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
                `Trajectory` of a `TrajectoryEnded`, the call of a `ToolEnded` and the text of its
                result, the arguments and the value of a `SpanEnded` as they were then, where
                a reader looks at such (`plain`).
        """


class Wants(Protocol):
    """Which of the trajectories that have ended a reader wants to be told of."""

    def __call__(self, step: int, uid: str, member: int, *, is_failed: bool) -> bool:
        """Whether this one."""


class EventStream:
    """Takes the events of one runtime to its readers.

    Who has something to tell asks `is_on` first, so that without a reader nothing is made::

        if events.is_on:
            events.tell(turn_ended, (trajectory, turn, began, now))

    Where all readers want some trajectories only, nothing but these facts is kept of a trajectory
    while it runs, and events are made of them once it has ended as one of those.

    Attributes:
        is_on: Whether anybody reads.
        tells_all: Whether anybody wants all of it, as it happens.
        tells_subjects: Whether anybody looks at what it happened to.
    """

    __slots__ = (
        "_clock",
        "_kinds",
        "_loop",
        "_notes",
        "_numbers",
        "_post",
        "_readers",
        "_readers_of",
        "_start",
        "_wants",
        "_without_subjects",
        "is_on",
        "tells_all",
        "tells_subjects",
    )

    def __init__(self) -> None:
        self.is_on = self.tells_all = self.tells_subjects = False
        self._readers: tuple[Reader, ...] = ()
        self._readers_of: dict[type[Event], tuple[Reader, ...]] = {}
        self._kinds: dict[Reader, Collection[type[Event]]] = {}
        self._wants: dict[Reader, Wants] = {}
        self._without_subjects: set[Reader] = set()
        self._notes: dict[int, list[Any]] = {}
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

    def begin(self, trajectory: int) -> None:
        """What is told of this one from now on may be wanted once it has ended."""
        if not self.tells_all:
            self._notes[trajectory] = []

    def tell(self, make: Make, facts: tuple[Any, ...]) -> None:
        """Something happened to a trajectory: emitted now, or once its end shows who wants it.

        Args:
            make: Makes the event, and its subject, of the facts.
            facts: The first is the trajectory's number.
        """
        if self.tells_all:
            self.emit(*make(self._start, facts))
        elif (notes := self._notes.get(facts[0])) is not None:
            # Flat, so that no container stays for each, which Python's collector would look at.
            notes.append(make)
            notes.append(len(facts))
            notes += facts

    def tell_event(self, trajectory: int, event: Event, subject: Any = None) -> None:
        """`tell` an event that is made already."""
        self.tell(lambda _, facts: (facts[1], facts[2]), (trajectory, event, subject))

    def tell_from_thread(self, make: Make, facts: tuple[Any, ...]) -> None:
        """`tell`, from whatever thread; from another one than the loop's it happens soon."""
        if threading.get_ident() == self._loop or self._post is None:
            self.tell(make, facts)
        else:
            self._post(lambda: self.tell(make, facts))

    def tell_notes(
        self, trajectory: int, step: int, uid: str, member: int, *, is_failed: bool
    ) -> bool:
        """Whether the end of a trajectory is to be told; what was kept of it has been then."""
        notes: Sequence[Any] = self._notes.pop(trajectory, ())
        if not self.tells_all:
            for wants in self._wants.values():
                if wants(step, uid, member, is_failed=is_failed):
                    break
            else:
                return False
        at = 0
        while at < len(notes):
            make, first, after = notes[at], at + 2, at + 2 + notes[at + 1]
            self.emit(*make(self._start, notes[first:after]))
            at = after
        return True

    def attach(
        self,
        reader: Reader,
        *,
        wants: Wants | None = None,
        kinds: Collection[type[Event]] | None = None,
        needs_subjects: bool = True,
    ) -> None:
        """Give it events from now on.

        Args:
            wants: Of a reader that has use for whole trajectories only: for which ones. It may get
                others too.
            kinds: Those that it gets; None: all.
            needs_subjects: Whether it looks at what events happened to.
        """
        if wants is not None:
            self._wants[reader] = wants
        if kinds is not None:
            self._kinds[reader] = kinds
        if not needs_subjects:
            self._without_subjects.add(reader)
        self._set((*self._readers, reader))

    def detach(self, reader: Reader) -> None:
        """Give it none any more; harmless where it gets none."""
        self._wants.pop(reader, None)
        self._kinds.pop(reader, None)
        self._without_subjects.discard(reader)
        self._set(tuple(each for each in self._readers if each is not reader))

    def emit(self, event: Event, subject: Any = None) -> None:
        """Hand an event to its readers, and what it happened to, which is not kept."""
        readers = self._readers_of.get(type(event))
        if readers is None:
            readers = self._find_readers(type(event))
        for reader in readers:
            try:
                reader(event, subject)
            except Exception:
                logger.exception("a reader of events raised; it is not called again")
                self.detach(reader)

    def now(self) -> float:
        """Seconds since the start of the run."""
        return self._clock() - self._start

    def since_start(self, at: float) -> float:
        """A time of the loop's clock as seconds since the start of the run."""
        return at - self._start

    def new_trajectory(self) -> int:
        """The number of another trajectory."""
        self._numbers += 1
        return self._numbers

    def _set(self, readers: tuple[Reader, ...]) -> None:
        self._readers, self.is_on = readers, bool(readers)
        self._readers_of = {}
        self.tells_all = len(readers) > len(self._wants)
        self.tells_subjects = len(readers) > len(self._without_subjects)
        if not self.is_on:
            self._notes.clear()

    def _find_readers(self, kind: type[Event]) -> tuple[Reader, ...]:
        readers = [each for each in self._readers if kind in self._kinds.get(each, (kind,))]
        found = self._readers_of[kind] = tuple(readers)
        return found


def _not_started() -> float:
    return 0.0
