"""Where trajectories wait that are carried from one call to the next.

A trajectory that is held keeps its task, its tools and its tokens, and has no request with an
engine: those that it has are cut off, and wait here with those that it would make. Its deadlines
stand still; they are made afresh when it continues.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import anyio

from rollout.limits import Deadline, PausableDeadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: What governs a trajectory whose time does not count.
NEVER = Deadline(math.inf, "limits.batch_s", math.inf)
CARRY_S = "limits.carry_s"


class Limits(Protocol):
    """What of the configuration's limits matters here; seconds."""

    @property
    def turn_s(self) -> float | None:
        """Of a generation and what answers it."""

    @property
    def generation_s(self) -> float | None:
        """Of a generation."""

    @property
    def carry_s(self) -> float | None:
        """While its tools are open."""


class Held(Protocol):
    """One generation of a trajectory that may be held."""

    @property
    def is_running(self) -> bool:
        """Whether an engine works on it."""

    @property
    def tokens(self) -> int:
        """How many it has so far."""

    def leave_queue(self) -> None:
        """Let it wait for no place any more."""

    def renew_deadline(self, deadline: Deadline, outermost: Deadline, outer: Deadline) -> None:
        """These hold from now on."""


class Hold:
    """A gate in front of the engines, for one trajectory.

    Attributes:
        is_closed: Whether it is held.
        generations: Those under way.
        closed_at: When it was held last, on the loop's clock.
    """

    def __init__(self, limits: Limits) -> None:
        self.is_closed = False
        self.generations: dict[Held, None] = {}
        self._seconds = 0.0
        self._limits = limits
        self._deadline: PausableDeadline | None = None
        self._has_open_tools: Callable[[], bool] = bool
        self._opened = self._changed = anyio.Event()
        self.closed_at = self._opened_at = 0.0
        #: Of turns that began before it was opened last; and what answers turns just now.
        self._turn = NEVER
        self._answering: dict[PausableDeadline, None] = {}

    def govern(self, deadline: PausableDeadline, has_open_tools: Callable[[], bool]) -> None:
        """This is the trajectory's deadline from now on; and this says whether its tools are open.

        Its tools may stay open for `carry_s` while it is held.
        """
        self._deadline, self._has_open_tools = deadline, has_open_tools
        if self.is_closed:
            self._stop_clocks()

    def begin(self, generation: Held) -> None:
        """A generation begins."""
        self.generations[generation] = None
        if self.is_closed:  # tools may have been opened since
            self._stop_clocks()

    def end(self, generation: Held) -> None:
        """It has ended."""
        del self.generations[generation]
        self.note()

    def note(self) -> None:
        """An engine has ended a request of it."""
        self._changed.set()
        self._changed = anyio.Event()

    def close(self) -> None:
        """Hold it: it makes no request, and waits for none, from now on."""
        self.is_closed, self.closed_at = True, anyio.current_time()
        self._opened = anyio.Event()
        self._stop_clocks()
        for generation in tuple(self.generations):
            generation.leave_queue()

    def open(self, deadline: Deadline) -> None:
        """Let it continue; `deadline` is the trajectory's."""
        self.is_closed = False
        self._opened_at = now = anyio.current_time()
        self._seconds += now - self.closed_at
        if self._deadline is not None:
            self._deadline.renew(deadline, NEVER)
        self._turn = turn = Deadline.after(self._limits.turn_s, "limits.turn_s", now=now)
        outer = turn.within(deadline)
        own = Deadline.after(self._limits.generation_s, "limits.generation_s", outer, now=now)
        for generation in self.generations:
            generation.renew_deadline(own, NEVER, turn)
        self._renew_turns(turn)
        self._opened.set()

    def seconds(self, until: float) -> float:
        """How long it was held, in all, up to that clock time."""
        return self._seconds + (max(0.0, until - self.closed_at) if self.is_closed else 0.0)

    def turn_deadline(self, deadline: Deadline) -> Deadline:
        """That of a turn as it is now; where it was held since the turn began, afresh."""
        if self.is_closed:
            return NEVER
        began = deadline.at - deadline.seconds
        is_before = deadline is NEVER or began < self._opened_at
        return self._turn if is_before else deadline

    @contextmanager
    def answering(self, deadline: Deadline) -> Iterator[None]:
        """The block answers a turn, also while it is held: that time does not count.

        Args:
            deadline: The turn's.

        Raises:
            LimitExceeded: The turn's deadline passed.
        """
        own = PausableDeadline(self.turn_deadline(deadline), NEVER)
        self._answering[own] = None
        try:
            with own:
                yield
        finally:
            del self._answering[own]

    def _renew_turns(self, deadline: Deadline) -> None:
        for own in self._answering:
            own.renew(deadline, NEVER)

    @property
    def tokens(self) -> int:
        """Of the generations under way, so far."""
        return sum(generation.tokens for generation in self.generations)

    async def wait(self) -> None:
        """Return when it may continue."""
        await self._opened.wait()

    async def stopped(self) -> None:
        """Return when no engine works on it."""
        while any(generation.is_running for generation in self.generations):
            await self._changed.wait()

    def _stop_clocks(self) -> None:
        until = NEVER
        if self._has_open_tools():
            now = self.closed_at
            until = Deadline.after(self._limits.carry_s, CARRY_S, now=now)
        if self._deadline is not None:
            self._deadline.renew(until, until)
        for generation in self.generations:
            generation.renew_deadline(until, until, NEVER)
        self._renew_turns(NEVER)
