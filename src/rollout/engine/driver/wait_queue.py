"""Requests that wait for a place on a replica, served by priority and in their order."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable


class _Turn:
    __slots__ = ("came", "place", "scope")

    def __init__(self, priority: int, number: int) -> None:
        self.place = (priority, -number)
        self.came = anyio.Event()
        self.scope: anyio.CancelScope | None = None


def _place(turn: _Turn) -> tuple[int, int]:
    return turn.place


class WaitQueue:
    """A queue of tasks; freed room wakes the first one.

    The first is the one of the highest priority, of equal ones the one that came first.

    Args:
        has_room: Whether it is worth looking.

    Attributes:
        deadline: When they are sent away.
    """

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._turns: list[_Turn] = []  # the first in line stands last
        self._called = 0  # whose turn has come, and who have not looked yet
        self._numbers = itertools.count()
        self.deadline = math.inf

    def __len__(self) -> int:
        return len(self._turns) + self._called

    async def wait(self, priority: int = 0) -> bool:
        """Return when it is the caller's turn; False once the line's deadline has passed.

        A caller that does not use the turn calls `wake_next`; cancellation passes it on.
        """
        turn = _Turn(priority, next(self._numbers))
        insort(self._turns, turn, key=_place)
        try:
            with anyio.CancelScope(deadline=self.deadline) as turn.scope:
                await turn.came.wait()
        except BaseException:
            self._leave(turn)
            if turn.came.is_set():
                self.wake_next()  # the turn was given to us
            raise
        self._leave(turn)
        return turn.came.is_set()

    def _leave(self, turn: _Turn) -> None:
        if turn.came.is_set():
            self._called -= 1
        else:
            del self._turns[bisect_left(self._turns, turn.place, key=_place)]

    def wake_next(self) -> None:
        """Give the first in line its turn, if there is room."""
        if self._turns and self._has_room():
            self._call(self._turns.pop())

    def wake_all(self) -> None:
        """Let all of them look, because nothing is as it was."""
        while self._turns:
            self._call(self._turns.pop())

    def _call(self, turn: _Turn) -> None:
        self._called += 1
        turn.came.set()

    def close_at(self, deadline: float) -> None:
        """Send them away then, those that come later too; infinity takes it back."""
        self.deadline = deadline
        for turn in self._turns:
            if turn.scope is not None:
                turn.scope.deadline = deadline


class Notifier:
    """Wakes all tasks that wait for a change; costs nothing where none does."""

    def __init__(self) -> None:
        self._changed: anyio.Event | None = None

    async def wait(self) -> None:
        """Return at the next `notify`."""
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def notify(self) -> None:
        """Wake all waiting tasks."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None
